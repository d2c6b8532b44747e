"""The process's configuration. This module owns the one global, an immutable record that ``configure`` swaps.

A process that never configures runs det. From a framework's command line::

    add_arguments(parser)  # --cake-workspace-pool-bytes, --cake-<op>-variant, --cake-<op>-<flag>
    args = parser.parse_args()
    validate_args(args)  # once; writes what it resolved back into args
    configure(args)  # in every process that runs ops

Torch-free to import; ``torch`` is looked at only where the process has imported it.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import settings as _settings
from ._args import Args
from ._arguments import add_arguments
from ._resolve import Configuration, option_string, pick_variant, resolve_args, variant_key
from ._values import coerce
from .errors import ConfigError
from .registry import op_spec, ops
from .settings import DEFAULT, SETTINGS, Setting

__all__ = [
    "Row",
    "Setting",
    "add_arguments",
    "configure",
    "configured",
    "deterministic",
    "option",
    "pool_bytes",
    "reset",
    "resolved",
    "setting",
    "temporary",
    "validate_args",
    "variant",
]

_log = logging.getLogger("cake.config")
_lock = threading.RLock()
_state: Configuration | None = None

_UNCONFIGURED = Configuration()

stamp = ""
"""What calls would run, as text: changes with the configuration. Tracers guard on it; see ``tracing``."""


def validate_args(args: Any) -> Any:
    """Check a framework's parsed arguments and write what cake resolved back into them.

    A selected op whose variant is unset gets fast, or det under ``args.deterministic_mode``. Every flag of a
    selected op, its variant and ``cake_workspace_pool_bytes`` are written back with their resolved values, so
    that a process that receives ``args`` sees the same; a second call, here or there, changes nothing.

    Args:
        args: a Namespace, a mutable mapping, or an object with attributes.

    Returns:
        ``args``.

    Raises:
        ConfigError: see ``configure``. Nothing has been written then.
        TypeError: ``args`` can't be read or written.
    """
    view = Args(args, what="validate_args")
    _, writes = resolve_args(view, {}, {})
    view.write(writes)
    return args


def configure(args: Any = None, *, require: Mapping[str, Any] | None = None, **overrides: Any) -> None:
    """Replace the whole configuration of this process. All or nothing: an error leaves the old one in place.

    Args:
        args: a Namespace, a mapping, or an object with attributes; names that are not cake's are the
            framework's own and ignored, except the options that select ops and ``deterministic_mode``. None
            configures nothing but the keywords.
        require: op -> a version specifier (``"==0.1.*"``) or a kernel content hash (``"sha256:…"``, also a
            prefix of at least 12 digits) that the installed op must have, or its entry of a saved manifest
            (``require=saved["ops"]``), whose kernel packages must be unchanged.
        **overrides: single values by the same names (``deterministic_mode=True``,
            ``cake_gdn_variant="det"``); they win over ``args``.

    Raises:
        ConfigError: an unknown cake option; an op's option without the op selected; a variant that the op
            doesn't have; fast asked for under deterministic mode; deterministic mode with a selected op that
            has no det; a value of the wrong kind; arguments that the op's own check refuses; an op that is
            not what ``require`` says; ``fla`` is on and no op can be registered with flash-linear-attention.
        UnknownOpError: ``require`` names an op that isn't installed.
        TypeError: ``args`` or ``require`` can't be read.
    """
    if require is not None and not isinstance(require, Mapping):
        raise TypeError(f"require must be a mapping of op to specifier or hash, got {type(require).__name__}")
    view = Args(args, overrides, what="configure")
    with _lock:
        new, _ = resolve_args(view, overrides, require or {})
        if new.require:
            from .provenance import check_requirements

            check_requirements(new.require)
        _check_process_settings(new)
        _swap(new)
    _log.info("configured: %s", "; ".join(f"{row.name}={row.value} ({row.source})" for row in resolved()))


def _check_process_settings(new: Configuration) -> None:
    # Every setting is read here, so that a malformed variable is refused now and not in the middle of a step.
    values = {name: _settings.resolve(name, new.settings) for name in SETTINGS}
    if values["fla"].value:
        from .fla import FlaError, register_ops

        try:
            register_ops()
        except FlaError as error:
            raise ConfigError(f"fla is on ({values['fla'].source}): {error}") from error


def _swap(new: Configuration | None) -> None:
    """Make ``new`` the configuration, and the logger's level what it says. Called under the lock."""
    global _state, stamp
    _state = new
    stamp = "" if new is None else repr((new.deterministic, new.ops))
    try:
        level = _settings.resolve("log", {} if new is None else new.settings)
    except ConfigError:
        return  # a malformed CAKE_LOG, which configure() refuses and an import warns of
    if level.source != DEFAULT or "cake.core._logging" in sys.modules:
        from ._logging import set_level

        set_level(None if level.source == DEFAULT else level.value)


def reset() -> None:
    """Return to the unconfigured state, in which every op runs det."""
    with _lock:
        _swap(None)


@contextmanager
def temporary(
    args: Any = None, *, require: Mapping[str, Any] | None = None, **overrides: Any
) -> Iterator[None]:
    """``configure`` for the length of a ``with`` block; then the old configuration is back.

    For tests and benchmarks. It holds for the whole process, so not for threads that need different
    configurations at one time.
    """
    with _lock:
        before = _state
    configure(args, require=require, **overrides)
    try:
        yield
    finally:
        with _lock:
            _swap(before)


def configured() -> bool:
    """Whether ``configure`` has been called (and not undone by ``reset``)."""
    return _state is not None


def _torch_deterministic() -> tuple[bool, bool]:
    """Whether torch's deterministic algorithms are on, and whether only as a warning. Never imports torch."""
    torch = sys.modules.get("torch")
    enabled = getattr(torch, "are_deterministic_algorithms_enabled", None)
    if enabled is None or not enabled():
        return False, False
    return True, bool(torch.is_deterministic_algorithms_warn_only_enabled())  # type: ignore[union-attr]


def deterministic() -> bool:
    """Whether a deterministic mode is on: the configured one or torch's."""
    state = _state
    return (state is not None and state.deterministic) or _torch_deterministic()[0]


def variant(op: str, requested: str | None = None) -> str:
    """The variant that a call of ``op`` runs now: "det" or "fast".

    Args:
        op: the op's name.
        requested: the call's own argument; wins over the configuration.

    Raises:
        UnknownOpError: no such op.
        ConfigError: ``requested`` isn't a variant of the op; the result would be fast under a deterministic
            mode; or nobody configured the op and it has no det.
    """
    state = _state
    if requested is None:
        settings = None if state is None else state.ops.get(op)
        if settings is None:
            return _unconfigured_variant(op)
        chosen, where = settings.variant.value, option_string(variant_key(op))
    else:
        chosen, where = requested, f"variant of op {op!r} (call argument)"
        pick_variant(op_spec(op), requested, state is not None and state.deterministic, where)
    if chosen == "fast":
        enabled, warn_only = _torch_deterministic()
        if enabled:
            message = (
                f"{where} is fast and torch.use_deterministic_algorithms(True) is in effect: "
                f"configure det, or turn torch's mode off"
            )
            if not warn_only:
                raise ConfigError(message)
            warnings.warn(message, stacklevel=2)
    return str(chosen)


def _unconfigured_variant(op: str) -> str:
    spec = op_spec(op)
    if "det" in spec.variants:
        return "det"
    raise ConfigError(
        f"op {op!r} has no det variant, and a process runs det until it configures another: "
        f"select the op and configure {variant_key(op)}={spec.variants[0]!r}"
    )


def option(op: str, name: str, given: Any = None) -> Any:
    """The value of one of the op's own flags for a call made now.

    Args:
        op: the op's name.
        name: the flag, "recompute_state" or "recompute-state".
        given: the call's own argument; wins over the configuration.

    Raises:
        UnknownOpError: no such op.
        LookupError: the op has no such flag.
        ConfigError: ``given`` isn't of the flag's kind.
    """
    state = _state
    settings = None if state is None else state.ops.get(op)
    if given is None and settings is not None:
        found = settings.options.get(name)
        if found is not None:
            return found.value
    flag = op_spec(op).flag(name)
    if given is not None:
        try:
            return coerce(flag.kind, given, flag.choices)
        except ValueError as error:
            raise ConfigError(f"option {name!r} of op {op!r} (call argument): {error}") from None
    return flag.default if settings is None else settings.options[flag.key].value


def setting(name: str, given: Any = None) -> Setting:
    """A setting of core (see ``cake.core.settings.SETTINGS``), with the source that won.

    Args:
        name: a key of ``SETTINGS``: "cache_dir", "jobs", …
        given: the call's own argument; wins over configure(), environment and default.

    Raises:
        LookupError: no such setting.
        ConfigError: the winning source holds something else than the setting's kind.
    """
    state = _state
    return _settings.resolve(name, {} if state is None else state.settings, given)


def pool_bytes() -> int:
    """The bound of the workspace pool in bytes: ``--cake-workspace-pool-bytes``, 0 by default."""
    state = _state
    return 0 if state is None else int(state.settings.get("workspace_pool_bytes", 0))


def requirements() -> Mapping[str, Any]:
    """What ``configure(require=…)`` was given, and found true."""
    return (_state or _UNCONFIGURED).require


@dataclass(frozen=True)
class Row:
    """One line of ``resolved()``. ``error`` says why the value can't be used; None where it can."""

    name: str
    value: Any
    source: str
    error: str | None = None


def resolved() -> list[Row]:
    """Everything that is configured, with the source that won: what ``cake doctor`` prints."""
    state = _state
    rows: list[Row] = []
    for name in SETTINGS:
        try:
            found = setting(name)
            rows.append(Row(name, found.value, found.source))
        except ConfigError as error:
            rows.append(Row(name, None, "environment", str(error)))
    if state is not None and state.deterministic:
        rows.append(Row("deterministic", True, "configure()"))
    elif _torch_deterministic()[0]:
        rows.append(Row("deterministic", True, "torch.use_deterministic_algorithms"))
    else:
        rows.append(Row("deterministic", False, DEFAULT if state is None else "configure()"))
    for spec in ops():
        settings = None if state is None else state.ops.get(spec.name)
        if settings is not None:
            rows.append(Row(f"{spec.name}.variant", settings.variant.value, settings.variant.source))
            rows += [Row(f"{spec.name}.{key}", s.value, s.source) for key, s in settings.options.items()]
            continue
        try:
            rows.append(Row(f"{spec.name}.variant", _unconfigured_variant(spec.name), DEFAULT))
        except ConfigError as error:
            rows.append(Row(f"{spec.name}.variant", None, DEFAULT, str(error)))
        rows += [Row(f"{spec.name}.{flag.key}", flag.default, DEFAULT) for flag in spec.flags]
    return rows
