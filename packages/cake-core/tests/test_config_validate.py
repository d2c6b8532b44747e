"""validate_args writes back what it resolved, so that every process sees the same."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from cake.core import config, hooks
from cake.core.errors import ConfigError

SECOND = """
import argparse, json, sys
from cake.core import config, hooks
args = argparse.Namespace(**json.loads(sys.argv[1]))
hooks.validate_args(args)
after = dict(vars(args))
hooks.configure(args)
name = sys.argv[2]
print(json.dumps([after, config.variant(name), config.option(name, "recompute_state"), config.pool_bytes()]))
assert "torch" not in sys.modules
"""


def test_everything_of_a_selected_op_is_written_back(op: Any) -> None:
    args = argparse.Namespace(**op.args(deterministic_mode=True))
    assert hooks.validate_args(args) is args
    assert getattr(args, f"cake_{op.name}_variant") == "det"
    assert getattr(args, f"cake_{op.name}_recompute_state") is False
    assert args.cake_workspace_pool_bytes == 0
    assert getattr(args, op.option) == "cake"


def test_nothing_of_an_op_that_is_not_selected_is_written(op: Any) -> None:
    args = {op.option: "other", "learning_rate": 1.0}
    config.validate_args(args)
    assert args == {op.option: "other", "learning_rate": 1.0, "cake_workspace_pool_bytes": 0}
    config.validate_args(args)
    config.configure(args)


@pytest.mark.parametrize(
    "more", [{}, {"deterministic_mode": True}, {"variant": "det", "recompute_state": True}]
)
def test_a_second_call_changes_nothing(op: Any, more: dict[str, Any]) -> None:
    args = argparse.Namespace(**op.args(cake_workspace_pool_bytes="256MiB", **more))
    hooks.validate_args(args)
    once = dict(vars(args))
    hooks.validate_args(args)
    assert vars(args) == once
    assert once["cake_workspace_pool_bytes"] == 2**28


@pytest.mark.parametrize("more", [{}, {"deterministic_mode": True}, {"recompute_state": True}], ids=str)
def test_a_second_process_sees_the_same(
    op: Any, more: dict[str, Any], toy_folder: Path, tmp_path: Path
) -> None:
    args = argparse.Namespace(**op.args(cake_workspace_pool_bytes="1KiB", **more))
    hooks.validate_args(args)
    hooks.configure(args)
    path = os.pathsep.join([str(toy_folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SECOND, json.dumps(vars(args)), op.name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    after, variant, recompute, pool = json.loads(done.stdout)
    assert after == vars(args)
    assert variant == config.variant(op.name)
    assert recompute == config.option(op.name, "recompute_state")
    assert pool == config.pool_bytes() == 1024


def test_an_error_writes_nothing(op: Any) -> None:
    args = argparse.Namespace(**op.args(cake_workspace_pool_bytes="1KiB", recompute_state="maybe"))
    before = dict(vars(args))
    with pytest.raises(ConfigError):
        hooks.validate_args(args)
    assert vars(args) == before


def test_it_does_not_configure(op: Any) -> None:
    hooks.validate_args(argparse.Namespace(**op.args()))
    assert not config.configured()


class Frozen(NamedTuple):
    """Arguments that can't be written to."""

    toy_backend: str = "cake"
    linear_attention_backend: str = "cake"


class Stubborn:
    """Arguments that take some names and refuse others."""

    def __init__(self) -> None:
        self.__dict__.update(toy_backend="cake", linear_attention_backend="cake")

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_variant"):
            raise AttributeError(f"{name} is read-only")
        self.__dict__[name] = value


def test_arguments_that_cannot_be_written_are_refused(op: Any) -> None:
    with pytest.raises(TypeError, match="mutable mapping, got mappingproxy"):
        config.validate_args(MappingProxyType(op.args()))
    stubborn = Stubborn()
    with pytest.raises(TypeError, match="Stubborn refuses"):
        config.validate_args(stubborn)
    assert vars(stubborn).get("cake_workspace_pool_bytes") is None
    with pytest.raises(TypeError):
        config.validate_args(Frozen())


def test_arguments_from_before_cake_was_there_will_do(op: Any) -> None:
    args = argparse.Namespace(**{op.option: "cake"})  # no cake option at all, as from an old checkpoint
    hooks.validate_args(args)
    assert getattr(args, f"cake_{op.name}_variant") == "fast"
    config.configure(argparse.Namespace())
    assert config.variant(op.name) == "det"
