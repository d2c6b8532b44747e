"""What cake's ops share. Every name here loads its module when first used; importing this one loads nothing.

Declaration     OpSpec, Flag, Selection, KernelPackage, ops, op_spec, entry
Configuration   add_arguments, validate_args, configure, variant, option
Building        prebuild, no_build, load
Memory          workspace (a module), release
For ops         checks, testing, hooks (modules)
For layers      split_projection
Provenance      manifest
Errors          CakeError and its kinds
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checks, hooks, testing, workspace
    from ._prebuild import prebuild
    from .config import add_arguments, configure, option, validate_args, variant
    from .errors import BuildError, CakeError, ConfigError, NoBuildError, ToolchainError, UnknownOpError
    from .gradients import split_projection
    from .hooks import release
    from .loader import load, no_build
    from .provenance import manifest
    from .registry import entry, op_spec, ops
    from .spec import Flag, KernelPackage, OpSpec, Selection

    __version__: str

_HOME = {
    "BuildError": "errors",
    "CakeError": "errors",
    "ConfigError": "errors",
    "Flag": "spec",
    "KernelPackage": "spec",
    "NoBuildError": "errors",
    "OpSpec": "spec",
    "Selection": "spec",
    "ToolchainError": "errors",
    "UnknownOpError": "errors",
    "add_arguments": "config",
    "configure": "config",
    "entry": "registry",
    "load": "loader",
    "manifest": "provenance",
    "no_build": "loader",
    "op_spec": "registry",
    "ops": "registry",
    "option": "config",
    "prebuild": "_prebuild",
    "release": "hooks",
    "split_projection": "gradients",
    "validate_args": "config",
    "variant": "config",
}

_MODULES = ("checks", "hooks", "testing", "workspace")

__all__ = [
    "BuildError",
    "CakeError",
    "ConfigError",
    "Flag",
    "KernelPackage",
    "NoBuildError",
    "OpSpec",
    "Selection",
    "ToolchainError",
    "UnknownOpError",
    "__version__",
    "add_arguments",
    "checks",
    "configure",
    "entry",
    "hooks",
    "load",
    "manifest",
    "no_build",
    "op_spec",
    "ops",
    "option",
    "prebuild",
    "release",
    "split_projection",
    "testing",
    "validate_args",
    "variant",
    "workspace",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cake-core")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("CAKE_LOG", "").strip() or os.environ.get("CAKE_FLA", "").strip():
    from ._logging import apply_environment

    apply_environment()
