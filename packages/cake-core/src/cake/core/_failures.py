"""What is kept of a failed compile: the sources, and the error for others who waited for it."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import uuid
from pathlib import Path

from cake.core.errors import BuildError

__all__ = ["keep", "repeat", "stamp"]

ERROR = "error.json"


def keep(root: Path, name: str, work: Path, error: BuildError) -> None:
    """Move a failed build's folder to ``failed`` and point the error there, unless the disk is what failed.

    Args:
        root: the cache folder.
        name: the entry's name.
        work: the build folder.
        error: gets the kept source, and a command that can be pasted as it is.
    """
    if "No space left on device" in error.output:
        error.source = None
        return
    kept = root / "failed" / name
    source = kept
    if error.source and Path(error.source).is_relative_to(work):
        source = kept / Path(error.source).relative_to(work)
    command = f"cd {shlex.quote(str(kept))} && {error.command}"
    told = {"message": str(error.args[0]), "command": command, "output": error.output, "source": str(source)}
    try:
        (work / ERROR).write_text(json.dumps(told), encoding="utf-8")
        kept.parent.mkdir(exist_ok=True)
        for _attempt in range(2):
            with contextlib.suppress(OSError):
                kept.rename(root / "tmp" / f"{name}.old-{uuid.uuid4().hex}")
            with contextlib.suppress(OSError):
                work.rename(kept)
                break
        else:
            return
    finally:
        for old in (root / "tmp").glob(f"{name}.old-*"):
            shutil.rmtree(old, ignore_errors=True)
    error.command, error.source = command, str(source)


def stamp(root: Path, name: str) -> tuple[int, int] | None:
    """Tells two failures of an entry apart; None where none is kept. Compares no clocks."""
    try:
        found = (root / "failed" / name / ERROR).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def repeat(root: Path, name: str) -> None:
    """Raise what another process's build of the entry has just failed with, if it can be read.

    Raises:
        BuildError: with that build's message, command, output and kept source.
    """
    try:
        told = json.loads((root / "failed" / name / ERROR).read_text(encoding="utf-8"))
        message = f"{told['message']} (in another process, which this one waited for)"
        error = BuildError(message, command=told["command"], output=told["output"], source=told["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # it is being replaced or was cleared: build, and see
    raise error
