"""A stand-in for flash-linear-attention's registries of backends, old and new, for machines without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cake.core.testing._ops import installed_distribution

__all__ = ["stand_in_fla"]

_BASE = """
import functools, os

_DISPATCH_DISABLED = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"


class BaseBackend:
    backend_type, package_name, env_var, default_enable, priority = "base", None, None, True, 5

    @classmethod
    def is_enabled(cls):
        return os.environ.get(cls.env_var or "", "1") != "0"

    def verify(self, name, *args, **kwargs):
        return getattr(self, name + "_verifier")(*args, **kwargs)


def ask(backends, function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        for backend in sorted(backends.values(), key=lambda b: b.priority):
            if backend.is_enabled() and backend.verify(function.__name__, *args, **kwargs)[0]:
                return getattr(backend, function.__name__)(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper
"""
# 0.6: functions and operations have registries, and `register` takes either.
_NEW = (
    _BASE
    + """
OPERATIONS, FUNCTIONS = {}, {}


def register(entry):
    def add(cls):
        backends = OPERATIONS.setdefault(entry, {}) if isinstance(entry, str) else FUNCTIONS[entry]
        backends[cls.backend_type] = cls()
        return cls

    return add


def dispatch(entry):
    if isinstance(entry, str):
        return lambda function: ask(OPERATIONS.setdefault(entry, {}), function)
    return ask(FUNCTIONS.setdefault(entry, {}), entry)
"""
)
# 0.5: operations have registries, made by the packages of their backends.
_OLD = (
    _BASE
    + """
import importlib


class BackendRegistry:
    _registries = {}

    def __init__(self, operation):
        self.backends = {}
        self._registries[operation] = self

    def register(self, backend):
        self.backends[backend.backend_type] = backend

    @classmethod
    def ensure_initialized(cls, operation):
        if operation not in cls._registries:
            try:
                importlib.import_module(f"fla.ops.{operation}.backends")
            except ImportError:
                pass


def dispatch(operation):
    BackendRegistry.ensure_initialized(operation)
    return lambda function: ask(BackendRegistry._registries[operation].backends, function)
"""
)
_FUNCTION = """
def {function}({signature}, **kwargs):
    return "flash-linear-attention", None
"""


@contextmanager
def stand_in_fla(
    folder: Path,
    version: str,
    operation: str,
    function: str,
    signature: str,
    *,
    dispatched: str = "operation",
) -> Iterator[None]:
    """An installed ``fla`` with one function, which returns ``("flash-linear-attention", None)`` itself.

    Args:
        folder: where it is written.
        version: from 0.6 on with the new registry, before with the old one.
        operation, function: ``fla.ops.<operation>`` has the function.
        signature: its arguments.
        dispatched: "operation", "function" (0.6 alone) or "" for a function that asks no backend.
    """
    new = tuple(map(int, version.split(".")[:2])) >= (0, 6)
    home = "fla.backends" if new else "fla.ops.backends"
    body = _FUNCTION.format(function=function, signature=signature)
    files = {
        "fla/__init__.py": "",
        "fla/ops/__init__.py": "",
        f"fla/ops/{operation}/__init__.py": body,
        ("fla/backends.py" if new else "fla/ops/backends.py"): _NEW if new else _OLD,
    }
    if dispatched:
        entry = f"({operation!r})" if dispatched == "operation" else ""
        files[f"fla/ops/{operation}/__init__.py"] = f"from {home} import dispatch\n\n\n@dispatch{entry}{body}"
        made = "" if new else f"from {home} import BackendRegistry\nBackendRegistry({operation!r})\n"
        files[f"fla/ops/{operation}/backends.py"] = made
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
    try:
        with installed_distribution(folder, "fla-core", version=version, files=files):
            yield
    finally:
        sys.modules.update(hidden)
