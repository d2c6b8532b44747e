"""From what a user asked to a configuration, or an error: pure in the arguments and the installed ops."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from . import registry
from ._args import Args
from ._values import coerce
from .errors import ConfigError
from .settings import CONFIGURE, DEFAULT, SETTINGS, Setting, is_unset
from .spec import Flag, OpSpec

__all__ = ["Configuration", "OpSettings", "pick_variant", "resolve_args", "variant_key"]

DETERMINISTIC = "deterministic_mode"
"""The framework's own option for deterministic mode (Megatron's and miles' name)."""


@dataclass(frozen=True)
class OpSettings:
    """What a configured process runs for one selected op."""

    variant: Setting
    options: Mapping[str, Setting]


@dataclass(frozen=True)
class Configuration:
    """One configuration, never changed after it was made; ``configure`` swaps the whole of it."""

    deterministic: bool = False
    ops: Mapping[str, OpSettings] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    require: Mapping[str, Any] = field(default_factory=dict)


def variant_key(op: str) -> str:
    return f"cake_{op}_variant"


def flag_key(op: str, flag: Flag) -> str:
    return f"cake_{op}_{flag.key}"


def option_string(key: str) -> str:
    """The command line's spelling of a key: ``--cake-gdn-variant``."""
    return "--" + key.replace("_", "-")


def pick_variant(spec: OpSpec, asked: str | None, deterministic: bool, where: str) -> str:
    """The variant that a selected op runs.

    Args:
        spec: the op.
        asked: what the user asked for; None where nobody did.
        deterministic: whether a deterministic mode is on.
        where: what to call the source of ``asked`` in a message.

    Raises:
        ConfigError: a variant that the op doesn't have, or one that the deterministic mode rules out.
    """
    if asked is not None and asked not in spec.variants:
        raise ConfigError(f"{where} must be one of {', '.join(spec.variants)}, got {asked!r}")
    if deterministic and "det" not in spec.variants:
        raise ConfigError(
            f"deterministic mode is on and op {spec.name!r} has no det variant "
            f"(it has {', '.join(spec.variants)}): turn the mode off or select another op"
        )
    if asked is None:
        preferred = "det" if deterministic else "fast"
        return preferred if preferred in spec.variants else spec.variants[0]
    if deterministic and asked == "fast":
        raise ConfigError(f"{where} is fast and deterministic mode is on: ask for det, or turn the mode off")
    return asked


def _selected(spec: OpSpec, args: Args) -> bool:
    if spec.selection is None:
        return any(not is_unset(args.get(key)) for key in _op_keys(spec))
    value = args.get(spec.selection.option)
    if isinstance(value, (list, tuple, set, frozenset)):
        return spec.selection.value in value
    return bool(value == spec.selection.value)


def _op_keys(spec: OpSpec) -> list[str]:
    return [variant_key(spec.name), *(flag_key(spec.name, flag) for flag in spec.flags)]


def _deterministic(args: Args) -> bool:
    value = args.get(DETERMINISTIC)
    if value is None:
        return False
    if value in (0, 1) and isinstance(value, int):
        return bool(value)
    raise ConfigError(f"{DETERMINISTIC} must be True or False, got {value!r}")


def _refuse_unselected(spec: OpSpec, args: Args) -> None:
    given = [key for key in _op_keys(spec) if not is_unset(args.get(key))]
    if given and spec.selection is not None:
        option, value = option_string(spec.selection.option), spec.selection.value
        raise ConfigError(
            f"{option_string(given[0])} needs op {spec.name!r}, which {option} {value} selects; "
            f"got {option} {args.get(spec.selection.option)!r}"
        )


def _refuse_unknown(args: Args, overrides: Mapping[str, Any], specs: tuple[OpSpec, ...]) -> None:
    known = [setting.key for setting in SETTINGS.values()]
    for spec in specs:
        known += _op_keys(spec)
    foreign = {DETERMINISTIC, *(spec.selection.option for spec in specs if spec.selection)}
    for name in args.names():
        ours = name.replace("-", "_").startswith("cake_")
        if name in known or (name in foreign) or not (ours or name in overrides) or args.get(name) is None:
            continue
        near = difflib.get_close_matches(name.replace("-", "_"), [*known, *sorted(foreign)], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        installed = ", ".join(spec.name for spec in specs) or "none"
        raise ConfigError(f"unknown cake option {name!r}{hint} (installed ops: {installed})")


def _op_settings(spec: OpSpec, args: Args, deterministic: bool) -> OpSettings:
    key = variant_key(spec.name)
    asked = args.get(key)
    asked = None if is_unset(asked) else asked
    chosen = pick_variant(spec, asked, deterministic, option_string(key))
    if asked is not None:
        source = CONFIGURE
    else:
        source = "deterministic mode" if deterministic else "default of a selected op"
    options: dict[str, Setting] = {}
    for flag in spec.flags:
        key = flag_key(spec.name, flag)
        given = args.get(key)
        if is_unset(given):
            options[flag.key] = Setting(flag.default, DEFAULT)
            continue
        try:
            options[flag.key] = Setting(coerce(flag.kind, given, flag.choices), CONFIGURE)
        except ValueError as error:
            raise ConfigError(f"{option_string(key)}: {error}") from None
    return OpSettings(Setting(chosen, source), MappingProxyType(options))


def resolve_args(
    args: Args, overrides: Mapping[str, Any], require: Mapping[str, Any]
) -> tuple[Configuration, dict[str, Any]]:
    """The configuration that ``args`` ask for, and the values that ``validate_args`` writes back.

    Raises:
        ConfigError: see ``cake.core.config.configure``.
    """
    specs = registry.ops()
    _refuse_unknown(args, overrides, specs)
    deterministic = _deterministic(args)
    settings: dict[str, Any] = {}
    for setting in SETTINGS.values():
        value = args.get(setting.key)
        if not is_unset(value):
            settings[setting.name] = setting.parse(value, option_string(setting.key))

    chosen: dict[str, OpSettings] = {}
    pool = SETTINGS["workspace_pool_bytes"]
    writes: dict[str, Any] = {pool.key: settings.get(pool.name, pool.default)}
    for spec in specs:
        if not _selected(spec, args):
            _refuse_unselected(spec, args)
            continue
        chosen[spec.name] = resolved = _op_settings(spec, args, deterministic)
        writes[variant_key(spec.name)] = resolved.variant.value
        for flag in spec.flags:
            writes[flag_key(spec.name, flag)] = resolved.options[flag.key].value

    view = MappingProxyType({**args.as_dict(), **writes})
    for spec in specs:
        if spec.name in chosen and spec.check_args is not None:
            try:
                registry.load_target(spec.check_args)(view)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(f"op {spec.name!r}: {error}") from error
    configuration = Configuration(
        deterministic, MappingProxyType(chosen), MappingProxyType(settings), MappingProxyType(dict(require))
    )
    return configuration, writes
