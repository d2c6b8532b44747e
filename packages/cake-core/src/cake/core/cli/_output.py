"""Files that commands write when they are done, and read again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["check_file", "read_results"]


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


def read_results(path: Path | None, op: str) -> dict[str, Any] | None:
    """A results document of `cake bench` for an op.

    Raises:
        ValueError: the file can't be read, or is no such document.
    """
    if path is None:
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ops = {row["op"] for row in found["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of cake bench: {type(error).__name__}: {error}") from None
    if ops - {op}:
        raise ValueError(f"{path} must hold results of {op!r}, got {', '.join(sorted(ops))}")
    return found
