"""The hooks of a training framework: four functions and one table, torch-free to import.

A framework calls ``add_arguments`` while it builds its parser, ``validate_args`` once after parsing,
``configure`` in every process that runs ops, and ``release`` when it wants the memory back. ``SOURCES`` says
where the functions come from: ``{"gdn": {"chunk_gated_delta_rule": "cake.gdn.api:chunk_gated_delta_rule"}}``,
one entry for each installed op, ready for the framework's own import by name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .config import add_arguments, configure, validate_args

if TYPE_CHECKING:
    SOURCES: Mapping[str, Mapping[str, str]]

__all__ = ["SOURCES", "add_arguments", "configure", "release", "validate_args"]

_HOLDERS = ("workspace", "tables", "loader", "_prebuild")


def release() -> int:
    """Give back what cake keeps between calls: the workspace pool, tables, and what was loaded and prebuilt.

    Libraries stay loaded in the process and stay in the cache. The configuration stays as it is.

    Returns:
        The bytes of scratch memory that the pool gave back.
    """
    freed = 0
    for name in _HOLDERS:
        module = sys.modules.get(f"{__package__}.{name}")  # what was never imported holds nothing
        if module is not None:
            result = module.release()
            freed += result if isinstance(result, int) else 0
    return freed


def __getattr__(name: str) -> Any:
    if name == "SOURCES":  # looked up when asked for, so that importing this module searches for nothing
        from .registry import ops

        return {spec.name: dict(spec.entry_points) for spec in ops()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
