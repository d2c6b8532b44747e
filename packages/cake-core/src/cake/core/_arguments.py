"""cake's options on an argparse parser that belongs to a framework."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from . import registry
from ._resolve import flag_key, option_string, variant_key
from ._values import coerce
from .errors import ConfigError
from .settings import SETTINGS
from .spec import Flag, OpSpec

__all__ = ["add_arguments"]


def _type(kind: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return coerce(kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


class _Target:
    """The parser or group that options go to; an option that is there already is left as it is."""

    def __init__(self, parser: Any) -> None:
        self.actions: dict[str, argparse.Action] = parser._option_string_actions
        self._parser = parser
        self._group: Any = None

    def add(self, key: str, **kwargs: Any) -> None:
        option = option_string(key)
        present = self.actions.get(option)
        if present is not None:
            if present.dest != key:
                raise ConfigError(
                    f"the parser already has {option}, stored as {present.dest!r}; cake needs {key!r}"
                )
            return
        if self._group is None:
            is_parser = isinstance(self._parser, argparse.ArgumentParser)
            self._group = self._parser.add_argument_group("cake") if is_parser else self._parser
        self._group.add_argument(option, dest=key, default=None, **kwargs)


def _add_flag(target: _Target, spec: OpSpec, flag: Flag) -> None:
    help = flag.help.replace("%", "%%")
    default = f" (default: {flag.default})".replace("%", "%%") if flag.default is not None else ""
    kwargs: dict[str, Any] = {"help": f"{spec.name}: {help}{default}"}
    if flag.kind == "bool":
        kwargs["action"] = argparse.BooleanOptionalAction
    else:
        kwargs["type"] = _type(flag.kind)
        kwargs["metavar"] = None if flag.choices else {"int": "N", "bytes": "BYTES"}.get(flag.kind, "TEXT")
        if flag.choices:
            kwargs["choices"] = flag.choices
    target.add(flag_key(spec.name, flag), **kwargs)


def _offer(actions: dict[str, argparse.Action], spec: OpSpec) -> None:
    """Let the framework's selecting option take the op's value, where it has a closed list of choices."""
    if spec.selection is None:
        return
    for action in {id(a): a for a in actions.values()}.values():
        choices = action.choices
        if (
            action.dest == spec.selection.option
            and choices is not None
            and spec.selection.value not in choices
        ):
            action.choices = [*choices, spec.selection.value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add cake's options to a framework's parser; a second call adds nothing.

    ``--cake-workspace-pool-bytes``, and for every installed op ``--cake-<op>-variant`` and its own flags, all
    unset by default. An option that the parser has already is left alone if it stores under the same name.
    Where the framework has defined the option that selects an op with a closed list of choices, the op's
    value joins the list; the option itself is the framework's to define.

    Args:
        parser: an ArgumentParser, or one of its groups.

    Raises:
        ConfigError: the parser has an option of the same spelling that stores under another name.
        TypeError: ``parser`` isn't an argparse parser.
    """
    if not hasattr(parser, "add_argument") or not hasattr(parser, "_option_string_actions"):
        raise TypeError(f"add_arguments takes an argparse.ArgumentParser, got {type(parser).__name__}")
    target = _Target(parser)
    pool = SETTINGS["workspace_pool_bytes"]
    target.add(
        pool.key, type=_type(pool.kind), metavar="BYTES", help=f"{pool.help} (default: {pool.default})"
    )
    for spec in registry.ops():
        _offer(target.actions, spec)
        rule = "fast, or det under deterministic mode" if len(spec.variants) > 1 else spec.variants[0]
        target.add(
            variant_key(spec.name),
            choices=spec.variants,
            help=f"variant of {spec.name} to run; unset: {rule}".replace("%", "%%"),
        )
        for flag in spec.flags:
            _add_flag(target, spec, flag)
