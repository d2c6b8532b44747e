"""Which versions of an op and of cake-core meet: every pair, and whether the op's bounds allow it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from release_build import Built, metadata
from release_checks import CORE, core_bounds
from release_record import ReleaseError

__all__ = ["BEYOND", "CONTRACT", "TREE", "Pair", "Stage", "pairs"]

TREE = "tree"
"""The label of what lies in the working tree."""
BEYOND = "99.0.0"
"""A core that doesn't exist yet, and that no op may accept."""

CONTRACT = "tests/ops"
"""Where the tests of what every op promises lie."""


@dataclass(frozen=True)
class Stage:
    """One version of one distribution, built.

    Args:
        distribution: ``cake-gdn``.
        label: its version, or ``tree``.
        built: its files.
        contract: a folder with the tests of every op's contract of its commit, where there are any.
    """

    distribution: str
    label: str
    built: Built
    contract: Path | None = None

    @property
    def version(self) -> str:
        return metadata(self.built.wheel)["Version"][0]

    @property
    def requirements(self) -> list[str]:
        return metadata(self.built.wheel).get("Requires-Dist", [])

    def __str__(self) -> str:
        return f"{self.label} ({self.version})" if self.label == TREE else self.label

    @property
    def folder(self) -> Path:
        return self.built.wheel.parent


@dataclass(frozen=True)
class Pair:
    """An op with a core; ``allowed`` says whether the op's bounds accept that core's version."""

    op: Stage
    core: Stage
    allowed: bool


def pairs(ops: Iterable[Stage], cores: Iterable[Stage], *, tree_only: bool = False) -> list[Pair]:
    """Every op with every core; with ``tree_only`` those in which the working tree takes part, and those with
    the core that doesn't exist.

    Raises:
        ReleaseError: an op doesn't bound cake-core, or accepts the core that doesn't exist.
    """
    found = []
    cores = list(cores)
    for op in ops:
        bounds = core_bounds(op.requirements)
        if bounds is None:
            raise ReleaseError(f"{op.distribution} {op.label} does not require {CORE}")
        for core in cores:
            if tree_only and TREE not in (op.label, core.label) and core.label != BEYOND:
                continue
            allowed = bounds.specifier.contains(Version(core.version), prereleases=True)
            if allowed and core.label == BEYOND:
                raise ReleaseError(f"{op.distribution} {op.label} accepts any later {CORE}: {bounds}")
            found.append(Pair(op, core, allowed))
    return found
