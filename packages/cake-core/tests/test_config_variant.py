"""Which variant runs: unconfigured, selected, under deterministic mode, and when the call asks."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from cake.core import config
from cake.core.errors import ConfigError, UnknownOpError


def test_a_process_that_never_configures_runs_det(op: Any) -> None:
    assert not config.configured()
    assert config.variant(op.name) == "det"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "fast"),
        ({"variant": None}, "fast"),
        ({"variant": ""}, "fast"),
        ({"deterministic_mode": False}, "fast"),
        ({"deterministic_mode": None}, "fast"),
        ({"deterministic_mode": True}, "det"),
        ({"deterministic_mode": 1}, "det"),
        ({"variant": "det"}, "det"),
        ({"variant": "fast"}, "fast"),
        ({"variant": "det", "deterministic_mode": True}, "det"),
    ],
)
def test_a_selected_op(op: Any, more: dict[str, Any], expected: str) -> None:
    args = op.args(**more)
    config.configure(args)
    assert config.variant(op.name) == expected
    namespace = argparse.Namespace(**args)
    config.validate_args(namespace)
    assert getattr(namespace, f"cake_{op.name}_variant") == expected


def test_an_op_that_is_not_selected_runs_det(op: Any) -> None:
    config.configure({op.option: "other"})
    assert config.variant(op.name) == "det"
    config.configure({})
    assert config.variant(op.name) == "det"


@pytest.mark.parametrize(
    "call",
    [
        lambda args: config.configure({**args, "deterministic_mode": True}),
        lambda args: config.configure(args, deterministic_mode=True),
        lambda args: config.configure(argparse.Namespace(**args), deterministic_mode=True),
        lambda args: config.validate_args(argparse.Namespace(**args, deterministic_mode=True)),
    ],
    ids=["mapping", "keyword", "namespace", "validate_args"],
)
def test_an_explicit_fast_under_deterministic_mode_is_an_error(op: Any, call: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        call(op.args(variant="fast"))
    assert f"--cake-{op.name}-variant is fast" in str(caught.value)
    assert "deterministic mode is on" in str(caught.value)
    assert not config.configured()


@pytest.mark.parametrize("call", [config.configure, config.validate_args])
def test_a_deterministic_mode_with_an_op_that_has_no_det_is_an_error(toy: Any, call: Any) -> None:
    args = {toy.option: "fastonly", "deterministic_mode": True}
    with pytest.raises(ConfigError, match=r"deterministic mode is on.*'fastonly' has no det"):
        call(args)
    with pytest.raises(ConfigError, match=r"deterministic mode is on.*'fastonly' has no det"):
        call({**args, "cake_fastonly_variant": "fast"})


def test_an_op_without_det_runs_once_it_is_selected_and_never_by_itself(toy: Any) -> None:
    with pytest.raises(ConfigError, match=r"'fastonly' has no det.*cake_fastonly_variant='fast'"):
        config.variant("fastonly")
    config.configure({toy.option: "fastonly"})
    assert config.variant("fastonly") == "fast"
    config.configure({toy.option: "fastonly", "cake_fastonly_variant": "fast"})
    assert config.variant("fastonly") == "fast"
    config.configure({}, deterministic_mode=True)
    with pytest.raises(ConfigError, match="'fastonly' has no det"):
        config.variant("fastonly")


def test_an_op_without_fast_runs_det_when_selected(toy: Any) -> None:
    config.configure({toy.option: "detonly"})
    assert config.variant("detonly") == "det"
    with pytest.raises(ConfigError, match="--cake-detonly-variant must be one of det, got 'fast'"):
        config.configure({toy.option: "detonly", "cake_detonly_variant": "fast"})


def test_an_unknown_variant_is_refused(op: Any) -> None:
    with pytest.raises(ConfigError, match=f"--cake-{op.name}-variant must be one of det, fast, got 'slow'"):
        config.configure(op.args(variant="slow"))


@pytest.mark.parametrize("value", ["yes", 2, 1.0, []])
def test_a_deterministic_mode_that_is_no_truth_value_is_refused(op: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match="deterministic_mode must be True or False, got"):
        config.configure(op.args(deterministic_mode=value))


def test_the_calls_own_argument_wins(op: Any) -> None:
    assert config.variant(op.name, "fast") == "fast"
    config.configure(op.args(variant="fast"))
    assert config.variant(op.name, "det") == "det"
    config.configure(op.args(variant="det"))
    assert config.variant(op.name, "fast") == "fast"
    with pytest.raises(ConfigError, match=r"call argument.*det, fast, got 'slow'"):
        config.variant(op.name, "slow")


def test_the_calls_own_fast_under_deterministic_mode_is_an_error(op: Any) -> None:
    config.configure(op.args(deterministic_mode=True))
    with pytest.raises(ConfigError, match=r"call argument.*is fast and deterministic mode is on"):
        config.variant(op.name, "fast")


def test_the_variant_is_read_when_it_is_asked_for(op: Any) -> None:
    config.configure(op.args())
    assert config.variant(op.name) == "fast"
    config.configure(op.args(deterministic_mode=True))
    assert config.variant(op.name) == "det"


@pytest.mark.parametrize("ask", [config.variant, lambda name: config.option(name, "depth")])
@pytest.mark.parametrize("configured", [False, True])
def test_an_unknown_op_is_refused(toy: Any, ask: Any, configured: bool) -> None:
    if configured:
        config.configure(toy.args())
    with pytest.raises(UnknownOpError, match=r"'toi'.*toy"):
        ask("toi")


def test_both_ops_of_one_option_value_are_selected(toy: Any) -> None:
    config.configure({toy.option: ["fastonly", "detonly"]})
    assert config.variant("fastonly") == "fast"
    assert config.variant("detonly") == "det"
    assert config.variant("toy") == "det"
    config.configure({toy.option: ("cake", "detonly")})
    assert config.variant("toy") == "fast"
