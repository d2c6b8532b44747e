"""How an op declares itself: frozen records, torch-free to import and cheap to read.

An op's distribution names its declaration in the entry-point group ``cake.ops``::

    [project.entry-points."cake.ops"]
    gdn = "cake.gdn.spec:SPEC"
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["VARIANTS", "Flag", "FlagKind", "KernelPackage", "OpSpec", "Selection"]

FlagKind = Literal["bool", "int", "str", "bytes"]

VARIANTS = ("det", "fast")
"""det: same call, same bits, always. fast: no promise about bits, never slower than det."""

_KINDS = ("bool", "int", "str", "bytes")
_OP_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_FLAG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_RESERVED_FLAGS = ("variant",)


@dataclass(frozen=True)
class Flag:
    """An option of one op: ``Flag("recompute-state")`` of gdn is ``--cake-gdn-recompute-state``.

    Args:
        name: lower-case words joined by hyphens, without the op's prefix.
        kind: "bool" (a switch that also has a ``--no-`` form), "int", "str" or "bytes" (takes 256MiB).
        default: the value where nobody sets the flag.
        help: one sentence for ``--help``.
        choices: the values that are accepted; empty accepts all of the kind.

    Raises:
        ValueError: a name, kind or default that can't be an option.
    """

    name: str
    kind: FlagKind = "bool"
    default: Any = False
    help: str = ""
    choices: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not _FLAG_NAME.match(self.name):
            raise ValueError(f"Flag.name must be lower-case words joined by hyphens, got {self.name!r}")
        if self.name in _RESERVED_FLAGS:
            raise ValueError(f"Flag.name {self.name!r} is taken: every op has --cake-<op>-{self.name}")
        if self.kind not in _KINDS:
            raise ValueError(
                f"Flag.kind of {self.name!r} must be one of {', '.join(_KINDS)}, got {self.kind!r}"
            )
        if self.kind == "bool" and not isinstance(self.default, bool):
            raise ValueError(f"Flag.default of {self.name!r} must be True or False, got {self.default!r}")
        if self.choices and self.default is not None and self.default not in self.choices:
            raise ValueError(
                f"Flag.default of {self.name!r} must be one of {self.choices}, got {self.default!r}"
            )

    @property
    def key(self) -> str:
        """The name as Python spells it: ``recompute_state``."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Selection:
    """The framework's option whose value selects the op, as in ``--linear-attention-backend cake``."""

    option: str
    value: str = "cake"


@dataclass(frozen=True)
class KernelPackage:
    """A folder of CUDA sources with its ``build.json``, inside an importable module.

    Args:
        name: what ``cake manifest`` calls it; unique within the op.
        module: the dotted module that holds the folder.
        path: the folder, relative to the module's own.
    """

    name: str
    module: str
    path: str = "csrc"

    def root(self) -> Path:
        """The folder. Finds the module without running it, so neither torch nor kernels are imported.

        Raises:
            FileNotFoundError: the module isn't installed.
        """
        try:
            found = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise FileNotFoundError(
                f"kernel package {self.name!r}: no module named {self.module!r} is installed"
            )
        locations = found.submodule_search_locations
        if locations:
            return Path(next(iter(locations))) / self.path
        if found.origin:
            return Path(found.origin).parent / self.path
        raise FileNotFoundError(f"kernel package {self.name!r}: module {self.module!r} has no folder")


@dataclass(frozen=True)
class OpSpec:
    """Everything about an op that can be said without importing it.

    Args:
        name: the op's name on the command line and in ``cake.core`` calls.
        distribution: the distribution that installs it; its version is the op's version.
        summary: one line for ``cake ops``.
        variants: which of "det" and "fast" the op has.
        selection: the framework's option that selects the op; None where only ``configure`` can.
        kernel_packages: its folders of CUDA sources.
        entry_points: public function -> "module:function", imported when first used.
        flags: its own options.
        check_args: "module:function" called with the parsed arguments (a mapping) once the op is selected;
            raises ValueError for a combination that the op refuses.
        bench: "module:attribute" that ``cake bench`` reads.
        verify: "module:attribute" that ``cake verify`` reads.
        fla: "module:attribute" of the ``cake.core.fla.Adapter`` for flash-linear-attention.
        prebuild_params: model parameters that ``prebuild`` accepts for the op -> one line of help.

    Raises:
        ValueError: a name, variant or target that can't be right.
    """

    name: str
    distribution: str
    summary: str = ""
    variants: tuple[str, ...] = VARIANTS
    selection: Selection | None = None
    kernel_packages: tuple[KernelPackage, ...] = ()
    entry_points: Mapping[str, str] = field(default_factory=dict, hash=False)
    flags: tuple[Flag, ...] = ()
    check_args: str | None = None
    bench: str | None = None
    verify: str | None = None
    fla: str | None = None
    prebuild_params: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not _OP_NAME.match(self.name):
            raise ValueError(f"OpSpec.name must be a lower-case identifier, got {self.name!r}")
        if (
            not self.variants
            or len(set(self.variants)) != len(self.variants)
            or set(self.variants) - set(VARIANTS)
        ):
            raise ValueError(
                f"OpSpec.variants of {self.name!r} must be some of {VARIANTS}, got {self.variants!r}"
            )
        for what, names in (
            ("flags", [f.name for f in self.flags]),
            ("kernel_packages", [p.name for p in self.kernel_packages]),
        ):
            doubled = sorted({n for n in names if names.count(n) > 1})
            if doubled:
                raise ValueError(
                    f"OpSpec.{what} of {self.name!r} must have distinct names, got {doubled} twice"
                )
        targets = dict(self.entry_points)
        for what in ("check_args", "bench", "verify", "fla"):
            if (target := getattr(self, what)) is not None:
                targets[what] = target
        for what, target in targets.items():
            if not _TARGET.match(target):
                raise ValueError(f"{what!r} of {self.name!r} must be 'module:attribute', got {target!r}")
        # Frozen through and through: the mappings can't be edited after the declaration either.
        object.__setattr__(self, "entry_points", MappingProxyType(dict(self.entry_points)))
        object.__setattr__(self, "prebuild_params", MappingProxyType(dict(self.prebuild_params)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can't be pickled, and a declaration travels to spawned workers.
        values = [getattr(self, f.name) for f in fields(self)]
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def flag(self, key: str) -> Flag:
        """The flag called ``key`` ("recompute_state" or "recompute-state").

        Raises:
            LookupError: the op has no such flag; the message lists those it has.
        """
        wanted = key.replace("-", "_")
        for flag in self.flags:
            if flag.key == wanted:
                return flag
        known = ", ".join(f.key for f in self.flags) or "none"
        raise LookupError(f"op {self.name!r} has no option {key!r}; it has: {known}")
