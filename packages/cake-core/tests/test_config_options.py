"""An op's own flags, and core's settings: kinds, selection, unknown names, what the op's own check says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from cake.core import config
from cake.core.errors import ConfigError


def test_defaults_hold_until_somebody_sets_a_flag(op: Any) -> None:
    assert config.option(op.name, "recompute_state") is False
    config.configure(op.args())
    assert config.option(op.name, "recompute_state") is False
    config.configure(op.args(recompute_state=True))
    assert config.option(op.name, "recompute_state") is True
    assert config.option(op.name, "recompute-state") is True
    assert config.option(op.name, "recompute_state", False) is False
    config.configure({op.option: "other"})
    assert config.option(op.name, "recompute_state") is False


def test_an_unknown_flag_lists_those_there_are(op: Any) -> None:
    for _ in range(2):
        with pytest.raises(LookupError, match=r"'width'.*recompute_state"):
            config.option(op.name, "width")
        config.configure(op.args())


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("cake_toy_depth", "5", "depth", 5),
        ("cake_toy_depth", -5, "depth", -5),
        ("cake_toy_layout", "tall", "layout", "tall"),
        ("cake_toy_keep", "2KiB", "keep", 2048),
        ("cake_toy_keep", 7, "keep", 7),
        ("cake_toy_recompute_state", "true", "recompute_state", True),
        ("cake_toy_recompute_state", 0, "recompute_state", False),
    ],
)
def test_values_come_in_the_flags_kind(toy: Any, key: str, value: Any, name: str, expected: Any) -> None:
    args = toy.args(**{key: value})
    config.configure(args)
    found = config.option("toy", name)
    assert (found, type(found)) == (expected, type(expected))
    config.validate_args(args)
    assert (args[key], type(args[key])) == (expected, type(expected))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("cake_toy_depth", "deep", ["--cake-toy-depth", "whole number", "'deep'"]),
        ("cake_toy_depth", True, ["--cake-toy-depth", "whole number", "True"]),
        ("cake_toy_depth", 1.5, ["--cake-toy-depth", "1.5"]),
        ("cake_toy_layout", "wide", ["--cake-toy-layout", "flat, tall", "'wide'"]),
        ("cake_toy_layout", 3, ["--cake-toy-layout", "text", "3"]),
        ("cake_toy_keep", -1, ["--cake-toy-keep", "at least 0", "-1"]),
        ("cake_toy_recompute_state", "maybe", ["--cake-toy-recompute-state", "true or false", "'maybe'"]),
        ("cake_workspace_pool_bytes", "lots", ["--cake-workspace-pool-bytes", "256MiB", "'lots'"]),
        ("cake_workspace_pool_bytes", True, ["--cake-workspace-pool-bytes", "True"]),
        ("cake_jobs", 0, ["--cake-jobs", "at least 1", "0"]),
        ("cake_log", "loud", ["--cake-log", "debug", "'loud'"]),
    ],
)
@pytest.mark.parametrize("call", [config.configure, config.validate_args])
def test_a_value_of_another_kind_is_refused(
    toy: Any, call: Any, key: str, value: Any, words: list[str]
) -> None:
    args = toy.args(**{key: value})
    before = dict(args)
    with pytest.raises(ConfigError) as caught:
        call(args)
    for word in words:
        assert word in str(caught.value)
    assert args == before
    assert not config.configured()


def test_the_calls_own_value_of_another_kind_is_refused(toy: Any) -> None:
    assert config.option("toy", "depth", "4") == 4
    with pytest.raises(ConfigError, match=r"'depth' of op 'toy'.*whole number, got 'deep'"):
        config.option("toy", "depth", "deep")


@pytest.mark.parametrize("own", [{"variant": "det"}, {"recompute_state": True}, {"recompute_state": False}])
@pytest.mark.parametrize("selection", [{}, {"other": 1}, "another value", None])
@pytest.mark.parametrize("call", [config.configure, config.validate_args])
def test_an_ops_flags_without_the_op_are_an_error(op: Any, call: Any, own: Any, selection: Any) -> None:
    args = op.args(**own)
    if isinstance(selection, dict):
        del args[op.option]
    else:
        args[op.option] = selection
    with pytest.raises(ConfigError) as caught:
        call(args)
    text = str(caught.value)
    (key,) = (k for k in args if k.startswith("cake_"))
    assert f"--{key.replace('_', '-')} needs op {op.name!r}" in text
    assert f"--{op.option.replace('_', '-')} cake" in text
    assert f"got --{op.option.replace('_', '-')} {args.get(op.option)!r}" in text


def test_an_op_that_no_option_selects_is_selected_by_its_own_flags(toy: Any) -> None:
    config.configure({})
    assert config.variant("loose") == "det"
    config.configure({"cake_loose_depth": 4})
    assert (config.variant("loose"), config.option("loose", "depth")) == ("fast", 4)
    config.configure({"cake_loose_variant": "det"})
    assert (config.variant("loose"), config.option("loose", "depth")) == ("det", 3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cake_{op}_variants", "did you mean 'cake_{op}_variant'"),
        ("cake_workspace_pool_byte", "did you mean 'cake_workspace_pool_bytes'"),
        ("cake-{op}-variant", "did you mean 'cake_{op}_variant'"),
        ("cake_nobody_variant", "installed ops: "),
    ],
)
def test_a_cake_option_that_nobody_declares_is_an_error(op: Any, name: str, hint: str) -> None:
    name, hint = name.format(op=op.name), hint.format(op=op.name)
    for call in (config.configure, config.validate_args):
        with pytest.raises(ConfigError) as caught:
            call(op.args(**{name: "det"}))
        assert repr(name) in str(caught.value)
        assert hint in str(caught.value)
        call(op.args(**{name: None}))


def test_a_keyword_that_means_nothing_is_an_error(op: Any) -> None:
    with pytest.raises(ConfigError, match="unknown cake option 'variant'"):
        config.configure(op.args(), variant="det")
    with pytest.raises(ConfigError, match=r"'deterministic'.*did you mean 'deterministic_mode'"):
        config.configure(op.args(), deterministic=True)


def test_what_is_the_frameworks_own_is_ignored(op: Any) -> None:
    config.configure(op.args(learning_rate=3e-4, cakes="many", variant="det", **{"a-b": 1}))
    assert config.variant(op.name) == "det"


def test_the_ops_own_check_sees_resolved_values(toy: Any) -> None:
    for call in (config.configure, config.validate_args):
        with pytest.raises(ConfigError, match="op 'toy': depth must be at most 9, got 10"):
            call(toy.args(cake_toy_depth="10"))
        with pytest.raises(ConfigError, match="op 'toy': depth 9 needs det"):
            call(toy.args(cake_toy_depth=9))
        call(toy.args(cake_toy_depth=9, deterministic_mode=True))
        call({toy.option: "other"})  # not selected: not checked, though the view would lack its values


@pytest.mark.parametrize(
    ("value", "expected"), [(None, 0), (0, 0), ("0", 0), ("256MiB", 2**28), ("1_000", None), (12345, 12345)]
)
def test_the_pools_bound(toy: Any, value: Any, expected: int | None) -> None:
    args = toy.args(cake_workspace_pool_bytes=value)
    if expected is None:
        with pytest.raises(ConfigError):
            config.configure(args)
        return
    assert config.pool_bytes() == 0
    config.configure(args)
    assert config.pool_bytes() == config.setting("workspace_pool_bytes").value == expected
    config.validate_args(args)
    assert args["cake_workspace_pool_bytes"] == expected


def test_a_path_will_do_for_a_folder(toy: Any, tmp_path: Path) -> None:
    config.configure(argparse.Namespace(**toy.args(cake_cache_dir=tmp_path)))
    assert config.setting("cache_dir") == config.Setting(str(tmp_path), "configure()")
