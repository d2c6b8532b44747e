"""What every op owes core and its users, whichever op it is: checked for all that are installed."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from cake.core import OpSpec, add_arguments, build, entry, ops

ROOT = Path(__file__).parents[1]
OPS = ops()


def test_every_op_of_the_repository_is_installed() -> None:
    here = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} - {"cake-core"}
    assert {spec.distribution for spec in OPS} >= here


@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
class TestOp:
    def test_is_named_alike_everywhere(self, spec: OpSpec) -> None:
        assert spec.distribution == f"cake-{spec.name}"
        module = importlib.import_module(f"cake.{spec.name}")
        assert module.SPEC is spec
        assert module.__version__
        assert spec.summary

    def test_has_det(self, spec: OpSpec) -> None:
        assert "det" in spec.variants

    def test_entry_points_load_and_are_documented(self, spec: OpSpec) -> None:
        assert spec.entry_points
        module = importlib.import_module(f"cake.{spec.name}")
        for name in spec.entry_points:
            function = entry(spec.name, name)
            assert function is getattr(module, name)
            assert {"Args:", "Returns:", "Raises:", "Determinism:"} <= set((function.__doc__ or "").split())

    def test_flags_reach_the_command_line(self, spec: OpSpec) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        wanted = {f"--cake-{spec.name}-{name}" for name in ("variant", *(flag.name for flag in spec.flags))}
        assert wanted <= known

    def test_flags_are_in_its_readme(self, spec: OpSpec) -> None:
        text = (ROOT / "packages" / spec.distribution / "README.md").read_text(encoding="utf-8")
        for flag in spec.flags:
            assert f"--cake-{spec.name}-{flag.name}" in text

    def test_every_cuda_source_belongs_to_a_record(self, spec: OpSpec) -> None:
        """Each .cu is compiled by some record, and each header is included by some source."""
        for declared in spec.kernel_packages:
            package = build.read_package(declared)
            used = {name for record in package.records for name in build.source_files(package, record)}
            there = {
                path.relative_to(package.root.parent).as_posix()
                for path in package.root.rglob("*.cu*")
                if path.suffix in (".cu", ".cuh")
            }
            assert there - used == set()

    def test_help_of_every_flag_is_a_sentence(self, spec: OpSpec) -> None:
        assert [flag.name for flag in spec.flags if not flag.help] == []
