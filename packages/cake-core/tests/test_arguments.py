"""add_arguments on parsers that belong to frameworks."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from cake.core import hooks
from cake.core.errors import ConfigError


def framework(op: Any, **kwargs: Any) -> argparse.ArgumentParser:
    """A framework's parser with the option that selects the op, and deterministic mode."""
    parser = argparse.ArgumentParser(**kwargs)
    parser.add_argument(f"--{op.option.replace('_', '-')}", default="own", choices=["own", "other"])
    parser.add_argument("--deterministic-mode", action="store_true")
    return parser


def options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def test_every_option_is_there_and_unset_by_default(op: Any) -> None:
    parser = framework(op)
    hooks.add_arguments(parser)
    found = options(parser)
    own = f"--cake-{op.name}-"
    assert {"--cake-workspace-pool-bytes", own + "variant", own + "recompute-state"} <= set(found)
    args = parser.parse_args([])
    ours = {k: v for k, v in vars(args).items() if k.startswith("cake_")}
    assert set(ours.values()) == {None}
    assert f"cake_{op.name}_variant" in ours


def test_a_second_call_adds_nothing(op: Any) -> None:
    parser = framework(op)
    hooks.add_arguments(parser)
    before, text = options(parser), parser.format_help()
    hooks.add_arguments(parser)
    assert options(parser) == before
    assert parser.format_help() == text


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_an_option_that_the_framework_has_already_stays_as_it_is(op: Any, handler: str) -> None:
    parser = framework(op, conflict_handler=handler)
    own = parser.add_argument(f"--cake-{op.name}-variant", default="det", help="the framework's own")
    pool = parser.add_argument("--cake-workspace-pool-bytes", type=int, default=7)
    hooks.add_arguments(parser)
    args = parser.parse_args([])
    assert getattr(args, f"cake_{op.name}_variant") == "det"
    assert args.cake_workspace_pool_bytes == 7
    assert own in parser._actions
    assert pool in parser._actions
    assert hasattr(args, f"cake_{op.name}_recompute_state")


def test_an_option_of_the_same_spelling_with_another_meaning_is_refused(op: Any) -> None:
    parser = framework(op)
    parser.add_argument(f"--cake-{op.name}-variant", dest="something_else")
    with pytest.raises(
        ConfigError, match=f"--cake-{op.name}-variant.*'something_else'.*'cake_{op.name}_variant'"
    ):
        hooks.add_arguments(parser)


def test_values_are_parsed_into_their_kinds(toy: Any) -> None:
    parser = framework(toy)
    hooks.add_arguments(parser)
    line = (
        "--toy-backend cake --cake-workspace-pool-bytes 256MiB --cake-toy-variant det "
        "--cake-toy-recompute-state --cake-toy-depth 5 --cake-toy-layout tall --cake-toy-keep 1.5KiB"
    )
    args = parser.parse_args(line.split())
    assert args.toy_backend == "cake"
    assert args.cake_workspace_pool_bytes == 256 * 2**20
    assert (args.cake_toy_variant, args.cake_toy_recompute_state) == ("det", True)
    assert (args.cake_toy_depth, args.cake_toy_layout, args.cake_toy_keep) == (5, "tall", 1536)
    assert parser.parse_args(["--no-cake-toy-recompute-state"]).cake_toy_recompute_state is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--cake-toy-variant slow", ["det", "fast", "'slow'"]),
        ("--cake-fastonly-variant det", ["fast", "'det'"]),
        ("--cake-toy-depth deep", ["whole number", "'deep'"]),
        ("--cake-toy-layout wide", ["flat", "tall", "'wide'"]),
        ("--cake-workspace-pool-bytes lots", ["--cake-workspace-pool-bytes", "256MiB", "'lots'"]),
        ("--cake-workspace-pool-bytes -1", ["--cake-workspace-pool-bytes"]),
    ],
)
def test_a_wrong_value_is_a_usage_error_with_both_sides(
    toy: Any, line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = framework(toy)
    hooks.add_arguments(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(line.split())
    assert caught.value.code == 2
    text = capsys.readouterr().err
    for word in words:
        assert word in text


def test_the_frameworks_option_takes_the_value_that_selects_the_op(op: Any) -> None:
    parser = framework(op)
    word = f"--{op.option.replace('_', '-')}"
    hooks.add_arguments(parser)
    assert getattr(parser.parse_args([word, "cake"]), op.option) == "cake"
    assert getattr(parser.parse_args([word, "other"]), op.option) == "other"
    with pytest.raises(SystemExit):
        parser.parse_args([word, "unheard"])


def test_the_option_that_selects_an_op_is_the_frameworks_to_define(toy: Any) -> None:
    parser = argparse.ArgumentParser()
    hooks.add_arguments(parser)
    assert "--toy-backend" not in options(parser)
    parser.add_argument("--toy-backend")
    assert parser.parse_args(["--toy-backend", "cake"]).toy_backend == "cake"


def test_help_is_printed_with_a_percent_sign_in_it(toy: Any) -> None:
    parser = framework(toy)
    hooks.add_arguments(parser)
    text = parser.format_help()
    assert "100% of it" in text
    assert "(default: 3)" in text


def test_a_group_of_a_parser_will_do(op: Any) -> None:
    parser = framework(op)
    group = parser.add_argument_group("model")
    hooks.add_arguments(group)  # type: ignore[arg-type]
    hooks.add_arguments(parser)
    assert options(parser).count(f"--cake-{op.name}-variant") == 1


@pytest.mark.parametrize("wrong", [None, [], argparse.Namespace()])
def test_something_else_than_a_parser_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        hooks.add_arguments(wrong)
