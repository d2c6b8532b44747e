"""Declarations: frozen, checked when made, and read without importing what they name."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from pathlib import Path

import pytest

from cake.core import registry
from cake.core.spec import Flag, KernelPackage, OpSpec, Selection
from cake.core.testing import installed_distribution


def test_a_declaration_is_frozen_through_and_through() -> None:
    entry_points = {"f": "m:f"}
    spec = OpSpec("toy", "cake-toy", entry_points=entry_points)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.entry_points["g"] = "m:g"  # type: ignore[index]
    entry_points["g"] = "m:g"
    assert dict(spec.entry_points) == {"f": "m:f"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Flag("depth", "int", 1).default = 2  # type: ignore[misc]


def test_a_declaration_can_be_hashed_compared_and_sent_to_a_worker() -> None:
    spec = OpSpec(
        "toy",
        "cake-toy",
        flags=(Flag("depth", "int", 1),),
        kernel_packages=(KernelPackage("toy", "cake.toy"),),
        selection=Selection("toy_backend"),
        entry_points={"f": "m:f"},
        prebuild_params={"heads": "number of heads"},
    )
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec
    assert hash(copy) == hash(spec)
    assert dataclasses.replace(spec, name="other").entry_points == spec.entry_points


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"name": "Recompute"}, ["name", "'Recompute'"]),
        ({"name": "a_b"}, ["name", "'a_b'"]),
        ({"name": "variant"}, ["variant", "taken"]),
        ({"name": "x", "kind": "float"}, ["kind", "'float'"]),
        ({"name": "x", "kind": "bool", "default": None}, ["True or False", "None"]),
        ({"name": "x", "kind": "str", "default": "c", "choices": ("a", "b")}, ["('a', 'b')", "'c'"]),
    ],
)
def test_a_flag_that_cannot_be_an_option_is_refused(kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Flag(**kwargs)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"name": "Toy"}, ["OpSpec.name", "'Toy'"]),
        ({"variants": ()}, ["variants", "()"]),
        ({"variants": ("det", "det")}, ["variants", "'det'"]),
        ({"variants": ("det", "slow")}, ["variants", "'slow'"]),
        ({"flags": (Flag("a"), Flag("a"))}, ["flags", "['a'] twice"]),
        ({"kernel_packages": (KernelPackage("k", "m"), KernelPackage("k", "n"))}, ["kernel_packages", "'k'"]),
        ({"entry_points": {"f": "no_colon"}}, ["'f'", "'no_colon'"]),
        ({"check_args": "m.f"}, ["'check_args'", "'m.f'"]),
        ({"bench": "m:"}, ["'bench'", "'m:'"]),
    ],
)
def test_an_op_that_cannot_be_right_is_refused(kwargs: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        OpSpec(**{"name": "toy", "distribution": "cake-toy", **kwargs})  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_flags_are_found_by_either_spelling_and_an_unknown_one_lists_them() -> None:
    spec = OpSpec("toy", "cake-toy", flags=(Flag("recompute-state"), Flag("depth", "int", 1)))
    assert spec.flag("recompute-state") is spec.flag("recompute_state") is spec.flags[0]
    with pytest.raises(LookupError, match=r"'width'.*recompute_state, depth"):
        spec.flag("width")


def test_a_kernel_package_is_found_without_running_its_module(tmp_path: Path) -> None:
    files = {
        "cake/boom/__init__.py": "raise RuntimeError('was imported')\n",
        "cake/boom/csrc/build.json": "{}",
    }
    with installed_distribution(tmp_path, "cake-boom", files=files):
        assert KernelPackage("boom", "cake.boom").root() == tmp_path / "cake" / "boom" / "csrc"
        assert "cake.boom" not in sys.modules
    with pytest.raises(FileNotFoundError, match=r"'boom'.*'cake\.boom'"):
        KernelPackage("boom", "cake.boom").root()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.at\.all"):
        KernelPackage("boom", "nowhere.at.all").root()


def test_installed_ops_name_things_that_exist() -> None:
    for spec in registry.ops():
        for package in spec.kernel_packages:
            assert (package.root() / "build.json").is_file(), package
        for function in spec.entry_points:
            assert callable(registry.entry(spec.name, function))
