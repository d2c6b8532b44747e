"""How the host modules of vendored packages import: the one rule that ``cake vendor check`` reads sources by
and ``cake.core.hosts`` runs them by. Torch-free.

A vendored module keeps the bytes of its upstream, so it imports by upstream's names: relative to where it
was (``from ..sibling import f``), by the full name (``from upstream.kernels.sibling import f``), or by the
bare name of a package (``import sibling``). Each of these means the op's own copy if the op carries the
package, and is then ``cake.<op>._vendor.<package>``. What isn't carried must be the standard library, torch,
tvm_ffi, cake.core, the op itself, or be allowed for the package in ``VENDORED.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Copies", "Target"]

_EVERYWHERE = frozenset({"torch", "tvm_ffi", *sys.stdlib_module_names})


@dataclass(frozen=True)
class Target:
    """What an import means.

    Args:
        package: the op's vendored package, or None where it is none of them.
        name: the module: inside ``package`` ("" is the package itself), else its absolute name.
    """

    package: str | None
    name: str


@dataclass(frozen=True)
class Copies:
    """The vendored packages of one op.

    Args:
        module: the op's module, ``cake.gdn``.
        upstream: package -> the dotted name by which its upstream imports it.
        allowed: package -> further modules that it may import, with all below them.
    """

    module: str
    upstream: Mapping[str, str]
    allowed: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, module: str, table: Mapping[str, Any]) -> Copies:
        """Those of a table, as ``VENDORED.json`` holds it."""
        return cls(
            module,
            {name: package.get("module", name) for name, package in table.items()},
            {name: tuple(package.get("allow", {}).get("imports", ())) for name, package in table.items()},
        )

    def absolute(self, package: str, folder: str, name: str, level: int) -> str | None:
        """The absolute upstream name of an import in the folder ``folder`` ("" or "a/b") of a package; None
        where the dots lead out of everything."""
        if level == 0:
            return name
        parts = [*self.upstream[package].split("."), *filter(None, folder.split("/"))]
        if level > len(parts):
            return None
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name])])

    def target(self, absolute: str) -> Target:
        """The module that an absolute name means in a vendored module."""
        for package, upstream in self.upstream.items():
            for prefix in (upstream, package, f"{self.module}._vendor.{package}"):
                if absolute == prefix or absolute.startswith(prefix + "."):
                    return Target(package, absolute[len(prefix) + 1 :])
        return Target(None, absolute)

    def permitted(self, package: str, absolute: str) -> bool:
        """Whether a module of ``package`` may import what none of the op's packages is."""
        if absolute.split(".")[0] in _EVERYWHERE:
            return True
        if absolute.startswith(f"{self.module}._vendor"):
            return False  # a copy that the op doesn't carry
        known = ("cake.core", self.module, *self.allowed[package])
        return any(absolute == name or absolute.startswith(name + ".") for name in known)

    def refusal(self, absolute: str, what: str) -> str:
        """Why the import of ``what`` isn't permitted, and what to do."""
        op = self.module.rpartition(".")[2]
        return (
            f"imports {what}, which is no package that {op} carries; vendor it beside this one, or allow it "
            f"with --allow-import {absolute.split('.')[0]}"
        )
