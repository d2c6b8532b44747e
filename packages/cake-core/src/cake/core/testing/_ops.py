"""Distributions that a test writes into a folder, found as if pip had installed them there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["installed_distribution", "write_distribution"]


def write_distribution(
    folder: Path,
    distribution: str,
    *,
    version: str = "1.0",
    ops: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write modules and the metadata of a distribution; a process with ``folder`` on its path finds both.

    Args:
        folder: made if need be; PYTHONPATH or sys.path must name it.
        distribution: the distribution's name, like ``cake-toy``.
        version: its version.
        ops: op -> ``module:attribute`` of its declaration, for the entry-point group ``cake.ops``.
        files: path below ``folder`` -> text.

    Returns:
        ``folder``.
    """
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    lines = ["[cake.ops]", *(f"{name} = {target}" for name, target in (ops or {}).items())]
    texts = {
        **{folder / path: text for path, text in (files or {}).items()},
        info / "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        info / "entry_points.txt": "\n".join(lines) + "\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@contextmanager
def installed_distribution(
    folder: Path,
    distribution: str,
    *,
    version: str = "1.0",
    ops: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Iterator[Path]:
    """``write_distribution``, with ``folder`` on ``sys.path`` and its modules forgotten again afterwards."""
    write_distribution(folder, distribution, version=version, ops=ops, files=files)
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield folder
    finally:
        sys.path.remove(str(folder))
        importlib.invalidate_caches()
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                parent, _, leaf = name.rpartition(".")
                module = sys.modules.pop(name)
                if getattr(sys.modules.get(parent), leaf, None) is module:
                    delattr(sys.modules[parent], leaf)
