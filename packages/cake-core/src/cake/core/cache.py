"""The folder of compiled libraries: looked up by content, published by one rename, right with or without
locks.

::

    <cache>/libraries/<library>-<key16>/    <library>.so, meta.json and the sources it was compiled from
    <cache>/failed/<library>-<key16>/       the sources of the last failed compile, its command and its output
    <cache>/locks/  <cache>/tmp/            lock files; builds under way

An entry appears by renaming a finished, synced folder, so nobody ever sees half of one. Each use checks the
library's size and sha256 against ``meta.json``; what doesn't agree is a miss and is built again. The lock of
an entry only keeps others from doing the same work: whoever loses a rename uses the winner's entry, so a lock
that is stale, or a file system on which locks do nothing, costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cake.core import _failures
from cake.core._entries import (
    META,
    Entry,
    damage,
    entries,
    entry_name,
    find,
    find_any,
    folder,
    folders,
    is_of,
    read,
    searched,
    size_of,
)
from cake.core.errors import BuildError

__all__ = [
    "META",
    "Entry",
    "ReadOnlyError",
    "adopt",
    "clear",
    "damage",
    "entries",
    "entry_name",
    "find",
    "find_any",
    "folder",
    "folders",
    "publish",
    "searched",
    "size_of",
]

LOCK_SECONDS = 1800.0
"""After this long behind another's lock a process builds for itself."""
STALE_SECONDS = 86400.0
"""A build folder this old belongs to nobody any more."""

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)

logger = logging.getLogger("cake.cache")


class ReadOnlyError(BuildError):
    """The cache can't be written to."""


# ---- publishing


def publish(
    library: str, key: str, files: Mapping[str, bytes], make: Callable[[Path], dict[str, Any]]
) -> Entry:
    """The entry of this build, making it if nobody has.

    Args:
        library: the library's name.
        key: its build key.
        files: sources by relative name; written into the build folder first.
        make: called with the build folder; leaves ``<library>.so`` there and returns what goes into
            ``meta.json``.
            A BuildError that it raises gets the path of the kept sources.

    Raises:
        ReadOnlyError: the cache can't be written to; ``make`` wasn't called.
        BuildError: ``make`` failed, or the disk is full. Nothing is left under ``libraries`` or ``tmp``.
    """
    root = folder()
    name = entry_name(library, key)
    with _explained(root, library, "building"):
        _prepare(root)
        before = _failures.stamp(root, name)
        with _lock(root / "locks" / f"{name}.lock", lambda: find(library, key)) as ready:
            if ready is not None:
                return ready
            if (
                _failures.stamp(root, name) != before
            ):  # of many ranks one shows the error, not each a minute later
                _failures.repeat(root, name)
            _sweep(root / "tmp")
            return _build(root, name, library, key, files, make)


def adopt(contents: Mapping[str, Mapping[str, bytes]]) -> list[tuple[Entry, bool]]:
    """Publish finished entries that were built elsewhere: all of them are written and synced before the first
    appears.

    Args:
        contents: name of an entry -> its files by relative name, ``meta.json`` and the library among them,
            already checked against each other.

    Returns:
        For each name the entry, and whether it is new: one that is there and whole already stays.

    Raises:
        ReadOnlyError: the cache can't be written to.
        BuildError: the disk is full. Nothing new was published, and nothing is left under ``tmp``.
    """
    root = folder()
    with _explained(root, "an archive", "importing"), contextlib.ExitStack() as stack:
        _prepare(root)
        _sweep(root / "tmp")
        ready: list[tuple[str, Path, Entry]] = []
        for name, files in contents.items():
            work = _work(root, name)
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            for relative, data in files.items():
                _write(work / relative, data)
            _sync(work)
            ready.append((name, work, Entry(root / "libraries" / name, json.loads(files[META]))))
        adopted: list[tuple[Entry, bool]] = []
        for name, work, ours in ready:
            there, _ = read(ours.path)
            if there is not None and there.meta["build_key"] == ours.meta["build_key"]:
                adopted.append((there, False))
            else:
                adopted.append((_rename(root, name, work, ours), True))
        return adopted


def _prepare(root: Path) -> None:
    for part in ("libraries", "locks", "tmp"):
        (root / part).mkdir(parents=True, exist_ok=True)
        if not os.access(root / part, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root / part))


@contextlib.contextmanager
def _explained(root: Path, what: str, doing: str) -> Iterator[None]:
    """Turn what the operating system says into an error that says what to do."""
    try:
        yield
    except BuildError:
        raise
    except OSError as error:
        if error.errno in _READ_ONLY:
            missing = (
                f"{what} is not in {searched()}{damage(what)}" if doing == "building" else f"{doing} {what}"
            )
            raise ReadOnlyError(
                f"{missing}: {root} cannot be written to ({error.strerror}); set CAKE_CACHE_DIR to a folder "
                "of your own, or prebuild this one"
            ) from error
        if error.errno in _FULL:
            raise BuildError(
                f"no space left in the cache {root} while {doing} {what}; free some, or set "
                "CAKE_CACHE_DIR to a folder on another disk"
            ) from error
        raise BuildError(
            f"the cache {root} is unusable ({error.strerror or error}) while {doing} {what}; set "
            "CAKE_CACHE_DIR to another folder"
        ) from error


def _build(
    root: Path,
    name: str,
    library: str,
    key: str,
    files: Mapping[str, bytes],
    make: Callable[[Path], dict[str, Any]],
) -> Entry:
    work = _work(root, name)
    try:
        for relative, data in files.items():
            _write(work / relative, data)
        try:
            meta = make(work)
        except BuildError as error:
            _failures.keep(root, name, work, error)
            raise
        data = (work / f"{library}.so").read_bytes()
        meta = {
            **meta,
            "library": library,
            "build_key": key,
            "library_size": len(data),
            "library_sha256": hashlib.sha256(data).hexdigest(),
        }
        _sync(work / f"{library}.so")
        _write(work / META, json.dumps(meta, indent=1, sort_keys=True).encode())
        _sync(work)
        return _rename(root, name, work, Entry(root / "libraries" / name, meta))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _work(root: Path, name: str) -> Path:
    work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=root / "tmp"))
    work.chmod(0o755)  # mkdtemp's 0700 would hide the entry from the other users of a shared cache
    return work


def _rename(root: Path, name: str, work: Path, ours: Entry) -> Entry:
    """Move the finished folder into place, or return the entry of whoever was first."""
    final = ours.path
    for attempt in range(50):
        try:
            work.rename(final)
            _sync(final.parent)
            return ours
        except OSError as error:
            # ENOENT: a network file system may report a rename that its first, lost answer had already done.
            if error.errno not in (*_TAKEN, errno.ENOENT):
                raise
            winner, why = read(final)
            if winner is not None and winner.meta.get("build_key") == ours.meta["build_key"]:
                return winner
            if winner is not None or why:
                logger.warning("replacing %s: %s", final, why or "it is another build's")
                aside = root / "tmp" / f"{name}.bad-{uuid.uuid4().hex}"
                with contextlib.suppress(OSError):
                    final.rename(aside)
                    shutil.rmtree(aside, ignore_errors=True)
            elif attempt:
                time.sleep(0.1)  # the winner's folder can take a moment to show on a network file system
    raise BuildError(f"{final} can be neither replaced nor read; remove it and try again")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # folders can't be synced everywhere
            raise
    finally:
        os.close(descriptor)


def _sweep(tmp: Path) -> None:
    """Remove what killed builders left behind, once it is too old to be anybody's."""
    limit = time.time() - STALE_SECONDS
    for path in tmp.iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, published: Callable[[], Entry | None]) -> Iterator[Entry | None]:
    """Hold the entry's lock, or don't: yields the entry once somebody has published it, None to whoever
    should build.

    Where locks don't work, or somebody holds one for LOCK_SECONDS without publishing, the caller builds
    without it.
    """
    import filelock

    lock = filelock.FileLock(str(path), mode=0o666)
    limit = time.monotonic() + LOCK_SECONDS
    held = False
    while not held and time.monotonic() < limit:
        try:
            lock.acquire(timeout=1.0, poll_interval=0.05)
            held = True
        except filelock.Timeout:
            ready = published()
            if ready is not None:
                yield ready
                return
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            logger.info("building without a lock, %s does not lock (%s)", path.parent, error)
            break
    try:
        yield published()
    finally:
        if held:
            with contextlib.suppress(OSError):
                lock.release()


def clear(library: str | None = None) -> tuple[int, int]:
    """Remove published entries and kept failures, of one library or all; with all, also what builds left
    behind.

    Builds that are under way in other processes publish as usual afterwards.

    Returns:
        (entries removed, bytes freed)
    """
    root = folder()
    count = size = 0
    for part in ("libraries", "failed") if library is not None else ("libraries", "failed", "tmp"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted((root / part).iterdir()):
                if library is not None and not is_of(path, library):
                    continue
                if part == "tmp" and path.stat().st_mtime > time.time() - 3600:
                    continue
                size += size_of(path)
                shutil.rmtree(path)
                count += part == "libraries"
    return count, size
