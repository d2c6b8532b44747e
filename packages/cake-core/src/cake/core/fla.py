"""Ops as backends of flash-linear-attention (FLA): a model that calls FLA's function gets cake's, unchanged.

In a program's first lines: ``import cake.gdn.fla``, or ``import cake.core`` with ``CAKE_FLA=1``. A program
that can't be edited is started with ``python -m cake.core.fla train.py …``, under torchrun with
``torchrun … -m cake.core.fla train.py …``.

FLA asks each of its backends whether it takes a call. Ours looks at every argument by name, and hands back
what cake doesn't know or doesn't serve; each reason is logged once. What it takes, it never hands back later:
a wrong argument raises cake's error. Tensors that kernels can't load as they lie are copied, as FLA copies
all that aren't contiguous. Served are the registries of FLA 0.5 and 0.6, for functions that it dispatches.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CakeError

__all__ = [
    "Adapter",
    "FlaError",
    "installed",
    "main",
    "register",
    "register_ops",
    "registered",
    "tensor_refusal",
]

#: Versions of flash-linear-attention whose registries are known.
VERSIONS = ">=0.5,<0.7"
#: FLA takes the lowest number first. 0 is Ascend's, 3 FlashQLA's, 5 the default.
PRIORITY = 2

_log = logging.getLogger("cake.fla")
_registered: dict[str, str] = {}
_handed_back: set[tuple[str, str]] = set()


class FlaError(CakeError, ImportError):
    """FLA isn't installed, or no version whose registry is known."""


@dataclass(frozen=True)
class Adapter:
    """One function of FLA's and what takes its place.

    Args:
        op: the op's name.
        operation: FLA's name of the registry, and of the package below ``fla.ops``.
        function: the function's name.
        target: ``module:attribute`` of cake's function.
        refusal: from a call's arguments by name, why it is handed back, or None. Looks at no values.
        ours: keywords of cake's function that aren't FLA's.
        rows: tensors whose last dimension kernels load in 16 bytes.
    """

    op: str
    operation: str
    function: str
    target: str
    refusal: Callable[[Mapping[str, Any]], str | None]
    ours: frozenset[str] = frozenset()
    rows: tuple[str, ...] = ()


def register(adapter: Adapter) -> str:
    """Registers cake's function with the installed FLA. A second call changes nothing.

    Returns:
        The version of FLA.

    Raises:
        FlaError: FLA isn't installed, is another version than served, has its dispatch switched off, or
            doesn't dispatch this function.
    """
    version = installed()
    if adapter.function in _registered:
        return version
    try:
        module = importlib.import_module(f"fla.ops.{adapter.operation}")
    except Exception as error:  # a Triton that it doesn't get on with, say
        reason = f"{type(error).__name__}: {error}"
        raise FlaError(f"flash-linear-attention {version} can't be imported: {reason}") from error
    theirs = getattr(module, adapter.function, None)
    if theirs is None:
        raise FlaError(f"flash-linear-attention {version} has no function {adapter.function}")
    _attach(adapter, theirs, version)
    _registered[adapter.function] = version
    _log.info("%s runs as a backend of flash-linear-attention %s", adapter.function, version)
    return version


def registered() -> dict[str, str]:
    """Functions of FLA's that cake takes, and the version of FLA."""
    return dict(_registered)


def register_ops() -> dict[str, str]:
    """Registers every installed op that has a part for FLA.

    Returns:
        Function -> version of FLA.

    Raises:
        FlaError: see `register`; raised only if not one op could be registered.
    """
    from . import registry

    installed()
    troubles = []
    for spec in registry.ops():
        if spec.fla is None:
            continue
        try:
            register(registry.load_target(spec.fla))
        except FlaError as error:
            troubles.append(f"{spec.name}: {error}")
    if troubles and not _registered:
        raise FlaError("; ".join(troubles))
    for trouble in troubles:
        _log.warning("%s", trouble)
    return registered()


def installed() -> str:
    """The version of FLA; imports nothing of it.

    Raises:
        FlaError: it isn't installed, or is another version than served.
    """
    from importlib.metadata import PackageNotFoundError, version

    from packaging.specifiers import SpecifierSet

    for name in ("fla-core", "flash-linear-attention"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not SpecifierSet(VERSIONS).contains(found, prereleases=True):
            raise FlaError(f"cake registers with flash-linear-attention {VERSIONS}, got {found}")
        return found
    raise FlaError(
        "flash-linear-attention isn't installed; to get it: pip install 'flash-linear-attention>=0.5.2,<0.7'"
    )


def _attach(adapter: Adapter, theirs: Any, version: str) -> None:
    """Puts our backend into the registry that `theirs` asks."""
    plain = inspect.unwrap(theirs)
    backends = _module("fla.backends")
    if backends is not None and hasattr(backends, "register") and hasattr(backends, "BaseBackend"):
        if getattr(backends, "_DISPATCH_DISABLED", False):
            raise FlaError("flash-linear-attention's dispatch is off: FLA_DISABLE_BACKEND_DISPATCH=1")
        backend = _backend(adapter, backends.BaseBackend, plain)
        try:
            backends.register(plain)(backend)  # the function has a registry of its own
        except KeyError:
            if _module(f"fla.ops.{adapter.operation}.backends") is None:
                raise FlaError(_undispatched(adapter, version)) from None
            backends.register(adapter.operation)(backend)
        return
    backends = _module("fla.ops.backends")
    if backends is None or not hasattr(backends, "BackendRegistry"):
        raise FlaError(f"flash-linear-attention {version} has no registry of backends that cake knows")
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise FlaError("flash-linear-attention's dispatch is off: FLA_DISABLE_BACKEND_DISPATCH=1")
    registries = backends.BackendRegistry
    registries.ensure_initialized(adapter.operation)
    registry = registries._registries.get(adapter.operation)
    if registry is None:
        raise FlaError(_undispatched(adapter, version))
    registry.register(_backend(adapter, backends.BaseBackend, plain)())


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _undispatched(adapter: Adapter, version: str) -> str:
    return (
        f"flash-linear-attention {version} doesn't ask backends for {adapter.function}: "
        f"use 0.5.2 or newer, or call {adapter.target.replace(':', '.')} directly"
    )


def _backend(adapter: Adapter, base: Any, plain: Any) -> Any:
    """The class that FLA asks and calls."""
    signature = inspect.signature(plain)
    positional = [
        name for name, p in signature.parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    module, _, attribute = adapter.target.partition(":")
    ours: Any = None
    known: frozenset[str] = frozenset()

    def function() -> Any:
        nonlocal ours, known
        if ours is None:
            found = getattr(importlib.import_module(module), attribute)
            known = frozenset(inspect.signature(found).parameters) - adapter.ours
            ours = found
        return ours

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        # FLA's own order of positional arguments, which differs between its versions.
        return {**dict(zip(positional, args, strict=False)), **kwargs}

    def verifier(self: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        function()
        given = by_name(args, kwargs)
        reason = _unknown(adapter, given, known) or adapter.refusal(given)
        if reason is not None and (adapter.function, reason) not in _handed_back:
            _handed_back.add((adapter.function, reason))
            _log.warning("%s: a call is handed back to flash-linear-attention: %s", adapter.function, reason)
        return reason is None, reason

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .launch import loadable

        given = by_name(args, kwargs)
        for name in adapter.rows:
            given[name] = loadable(given[name])
        return function()(**given)

    members = {
        "__doc__": f"cake's {adapter.function}. FLA_CAKE=0 switches it off.",
        "backend_type": "cake",
        "package_name": None,
        "env_var": "FLA_CAKE",
        "default_enable": True,
        "priority": PRIORITY,
        adapter.function: run,
        f"{adapter.function}_verifier": verifier,
    }
    return type("CakeBackend", (base,), members)


def _unknown(adapter: Adapter, given: Mapping[str, Any], known: frozenset[str]) -> str | None:
    unknown = sorted(set(given) - known)
    return f"cake doesn't know the keyword {', '.join(unknown)}" if unknown else None


def tensor_refusal(
    given: Mapping[str, Any], kernels: Callable[[Any], str], names: tuple[str, ...] = ("q", "k", "v")
) -> str | None:
    """Why no gated delta rule of cake's serves tensors like these, or None.

    Args:
        given: arguments by name.
        kernels: of a device, the backend that serves it; raises NotImplementedError where none does.
        names: tensors with a head dimension.
    """
    import torch

    bf16, fp32 = torch.bfloat16, torch.float32
    for name in names:
        x = given.get(name)
        if x is None:
            continue
        if name != "g" and x.dtype != bf16:
            return f"cake serves bfloat16, got {name} of {x.dtype}"
        if x.shape[-1] != 128:
            return f"cake serves head dimension 128, got {x.shape[-1]} of {name}"
    for name in ("g", "beta", "A_log", "dt_bias"):
        x = given.get(name)
        if x is not None and x.dtype not in (bf16, fp32):
            return f"cake serves float32 and bfloat16, got {name} of {x.dtype}"
    state = given.get("initial_state")
    if state is not None and state.dtype != fp32:
        return f"cake serves states in float32, got initial_state of {state.dtype}"
    for name in ("chunk_indices", "max_num_seqs"):
        if given.get(name) is not None:
            return f"cake doesn't serve {name}"
    if given.get("chunk_size", 64) != 64:
        return f"cake serves chunk_size 64, got {given['chunk_size']}"
    q = given.get("q")
    try:
        if q is not None:
            kernels(q.device)
    except NotImplementedError as error:
        return str(error)
    return None


def main(argv: list[str] | None = None) -> None:
    """Registers, then runs a script or (with -m) a module as if Python had been started with it."""
    import runpy

    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help") or (words[0] == "-m" and len(words) < 2):
        raise SystemExit("usage: python -m cake.core.fla (script.py | -m module) [arguments]")
    register_ops()
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    if module:
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    from pathlib import Path

    sys.path.insert(0, str(Path(words[0]).parent.absolute()))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    # As the module that ops know, not as a second copy of it called __main__.
    importlib.import_module("cake.core.fla").main()
