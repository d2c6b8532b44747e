"""Runs the host modules of vendored packages: each op's own copies, whatever another op or upstream has.

A vendored package may bring Python beside its CUDA. It is imported as ``cake.<op>._vendor.<package>``, so two
ops that carry a package of the same name have two modules, and what its sources import by upstream's names
means the op's copies::

    from cake.core import hosts

    host = hosts.module("gdn", "some_package.host")  # in the op: a module of its _vendor
    kernels = hosts.library(__name__, "scan", arch=arch)  # in a vendored module: of its own package

An import that ``cake vendor check`` would refuse raises ImportError here as well. Importing this module puts
a finder for such names on ``sys.meta_path``; every other import is left alone. Torch-free.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from cake.core import registry
from cake.core._vendored import Copies

__all__ = ["library", "module"]

VENDOR = "_vendor"


def module(op: str, name: str) -> ModuleType:
    """A host module of an op's vendored package.

    Args:
        op: an installed op.
        name: ``package`` or ``package.module``, below the op's ``_vendor``.

    Raises:
        UnknownOpError: no such op.
        ValueError: the op carries no such package; the message lists those it does.
        ImportError: the package has no such module, or it imports what it may not.
    """
    parent = _module_of(op)
    copies = _copies(parent)
    package = name.split(".")[0]
    if package not in copies.upstream:
        known = ", ".join(sorted(copies.upstream)) or "none"
        raise ValueError(f"op {op!r} carries no package {package!r}; it carries: {known}")
    return importlib.import_module(f"{parent}.{VENDOR}.{name}")


def library(name: str, library: str, *, arch: str) -> Any:
    """A library of the vendored package that a host module belongs to, as ``cake.core.load`` gives it.

    Args:
        name: the host module's ``__name__``.
        library: a ``library`` of the package's ``build.json``.
        arch: in any spelling that ``toolchain.parse_arch`` takes.

    Raises:
        ValueError: ``name`` is no vendored module of an op, or the op's declaration names no such package or
            library.
        NotImplementedError, NoBuildError, ToolchainError, BuildError: as ``cake.core.load``.
    """
    from cake.core import loader

    parent, mark, rest = name.partition(f".{VENDOR}.")
    op = next((spec.name for spec in registry.ops() if mark and _module_of(spec.name) == parent), None)
    if op is None:
        raise ValueError(f"name must be the __name__ of a vendored host module, got {name!r}")
    return loader.load(op, library, arch=arch, package=rest.split(".")[0])


def _module_of(op: str) -> str:
    packages = registry.op_spec(op).kernel_packages
    return packages[0].module if packages else f"cake.{op}"


def _copies(parent: str) -> Copies:
    from cake.core import vendor

    found = importlib.import_module(parent)
    for folder in found.__path__:
        table = vendor.read_table(Path(folder) / VENDOR)
        if table:
            return Copies.of(parent, table)
    return Copies(parent, {}, {})


class _Loader(SourceFileLoader):
    """Runs a vendored module with an ``__import__`` of its own; the names in it are upstream's."""

    def __init__(self, name: str, path: str, copies: Copies, package: str, folder: str) -> None:
        super().__init__(name, path)
        self._where = copies, package, folder

    def exec_module(self, module: ModuleType) -> None:
        copies, package, folder = self._where
        module.__dict__["__builtins__"] = {
            **vars(builtins),
            "__import__": _Import(copies, package, folder, module.__name__),
        }
        super().exec_module(module)


class _Import:
    """``__import__`` inside one vendored module."""

    def __init__(self, copies: Copies, package: str, folder: str, name: str) -> None:
        self.copies, self.package, self.folder, self.name = copies, package, folder, name

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        absolute = self.copies.absolute(self.package, self.folder, name, level)
        if absolute is None:
            raise ImportError(f"{self.name} imports {'.' * level}{name}, which leads out of its upstream")
        target = self.copies.target(absolute)
        if target.package is not None:
            return self._own(absolute, target.package, target.name, tuple(fromlist or ()))
        below = {n: self.copies.target(f"{absolute}.{n}") for n in fromlist or ()}
        own = {
            n: self._load(found.package, found.name)
            for n, found in below.items()
            if found.package is not None
        }
        beyond = [n for n in below if n not in own]
        if own and not beyond:
            return SimpleNamespace(**own)
        if not self.copies.permitted(self.package, absolute):
            what = f"{', '.join(beyond)} from {absolute}" if beyond else absolute
            raise ImportError(f"{self.name} {self.copies.refusal(absolute, what)}", name=absolute)
        found = builtins.__import__(absolute, globals, locals, fromlist or (), 0)
        return SimpleNamespace(**{n: getattr(found, n) for n in beyond}, **own) if own else found

    def _load(self, package: str, inside: str) -> ModuleType:
        parts = [self.copies.module, VENDOR, package, *filter(None, [inside])]
        return importlib.import_module(".".join(parts))

    def _own(self, absolute: str, package: str, inside: str, names: tuple[str, ...]) -> Any:
        found = self._load(package, inside)
        for name in names:
            if name != "*" and not hasattr(found, name) and hasattr(found, "__path__"):
                try:
                    importlib.import_module(f"{found.__name__}.{name}")
                except ModuleNotFoundError as error:
                    if error.name != f"{found.__name__}.{name}":
                        raise  # else Python says that the name can't be imported from the module
        if names:
            return found
        # `import a.b.c` binds a: a chain of names down to the package, whose modules are its attributes.
        top: Any = self._load(package, "")
        depth = len(absolute.split(".")) - len([part for part in inside.split(".") if part])
        for part in reversed(absolute.split(".")[1:depth]):
            top = SimpleNamespace(**{part: top})
        return top


class _Finder:
    """Finds ``cake.<op>._vendor.<package>…`` and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, mark, rest = name.partition(f".{VENDOR}.")
        if not mark or not any(_module_of(spec.name) == parent for spec in registry.ops()):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
            return spec
        package, *inside = rest.split(".")
        folder = inside if spec.submodule_search_locations is not None else inside[:-1]
        copies = _copies(parent)
        if package not in copies.upstream:
            return None
        spec.loader = _Loader(name, spec.origin, copies, package, "/".join(folder))
        return spec


sys.meta_path.insert(0, _Finder())
