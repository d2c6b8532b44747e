"""The installed ops, found through the entry-point group ``cake.ops``.

Reading a declaration imports neither torch nor kernels. What was found is remembered for as long as
``sys.path`` stays as it is.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from .errors import ConfigError, UnknownOpError
from .spec import OpSpec

__all__ = ["GROUP", "broken", "entry", "load_target", "op_spec", "ops", "refresh"]

GROUP = "cake.ops"

_log = logging.getLogger("cake.registry")


@dataclass(frozen=True)
class _Found:
    path: tuple[str, ...]
    specs: Mapping[str, OpSpec]
    broken: Mapping[str, Exception]


_found: _Found | None = None
_lock = threading.RLock()


def _read(point: Any) -> OpSpec:
    spec = point.load()
    if not isinstance(spec, OpSpec):
        raise ConfigError(
            f"entry point {point.name!r} of {GROUP} must be an OpSpec, got {type(spec).__name__}"
        )
    if spec.name != point.name:
        raise ConfigError(f"entry point {point.name!r} of {GROUP} declares an op called {spec.name!r}")
    return spec


def _scan(path: tuple[str, ...]) -> _Found:
    from importlib.metadata import entry_points

    specs: dict[str, OpSpec] = {}
    wrong: dict[str, Exception] = {}
    owners: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else "?"
        if point.name in owners:
            specs.pop(point.name, None)
            wrong[point.name] = ConfigError(
                f"op {point.name!r} is declared by two distributions, {owners[point.name]} and {owner}"
            )
            continue
        owners[point.name] = owner
        try:
            specs[point.name] = _read(point)
        except Exception as error:  # one broken distribution must not take the others with it
            wrong[point.name] = error
            _log.warning("op %s of %s can't be used: %s: %s", point.name, owner, type(error).__name__, error)
    return _Found(path, MappingProxyType(dict(sorted(specs.items()))), MappingProxyType(wrong))


def _current() -> _Found:
    global _found
    found, path = _found, tuple(sys.path)
    if found is None or found.path != path:
        with _lock:
            found = _found
            if found is None or found.path != path:
                found = _found = _scan(path)
    return found


def ops() -> tuple[OpSpec, ...]:
    """The declarations of all installed ops, by name. One that can't be read is left out, with a warning."""
    return tuple(_current().specs.values())


def broken() -> Mapping[str, Exception]:
    """Ops whose declaration can't be read, and why."""
    return _current().broken


def op_spec(name: str) -> OpSpec:
    """The declaration of one op.

    Raises:
        UnknownOpError: no installed distribution declares it; the message lists those that are installed.
        ConfigError: it is declared, and the declaration can't be read.
    """
    found = _current()
    spec = found.specs.get(name)
    if spec is not None:
        return spec
    if name in found.broken:
        error = found.broken[name]
        raise ConfigError(
            f"op {name!r} is installed and can't be used: {type(error).__name__}: {error}"
        ) from error
    known = ", ".join(found.specs) or "none (try: pip install cake-gdn)"
    raise UnknownOpError(f"unknown op {name!r}; installed ops: {known}")


def refresh() -> None:
    """Forget what was found, so that the next question looks again: for ops installed meanwhile."""
    global _found
    with _lock:
        _found = None


def load_target(target: str) -> Any:
    """The object that ``module:attribute`` names; imports the module."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def entry(op: str, function: str) -> Any:
    """A public function of an op, imported on first use.

    Raises:
        UnknownOpError: no such op, or the op has no such function; the message lists those it has.
    """
    spec = op_spec(op)
    target = spec.entry_points.get(function)
    if target is None:
        known = ", ".join(spec.entry_points) or "none"
        raise UnknownOpError(f"op {op!r} has no entry point {function!r}; it has: {known}")
    return load_target(target)
