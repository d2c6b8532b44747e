"""Files that commands write when they are done."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_file"]


def check_file(option: str, path: Path | None) -> None:
    """Whether what an option names can be written, asked before minutes of measuring are lost.

    Raises:
        ValueError: a folder, or a place that can't be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got the folder {path}")
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{option} must be a file in a folder that can be written to, got {path}")
