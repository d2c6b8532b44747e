"""The folder of compiled libraries: looked up by content, published by one rename, right with or without
locks.

::

    <cache>/libraries/<library>-<key16>/    <library>.so, meta.json and the sources it was compiled from
    <cache>/failed/<library>-<key16>/       the sources of the last failed compile, its command and its output
    <cache>/locks/  <cache>/tmp/            lock files; builds under way

An entry appears by renaming a finished, synced folder, so nobody ever sees half of one. Each use checks the
library's size and sha256 against ``meta.json``; what doesn't agree is a miss and is built again. The lock of
an entry only keeps
others from doing the same work: whoever loses a rename uses the winner's entry, so a lock that is stale, or
a file system on which locks do nothing, costs time and nothing else.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core import _failures, config
from cake.core.errors import BuildError

__all__ = [
    "Entry",
    "ReadOnlyError",
    "clear",
    "entries",
    "entry_name",
    "find",
    "find_any",
    "folder",
    "publish",
]

META = "meta.json"
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


@dataclass(frozen=True)
class Entry:
    """A published library whose bytes were checked.

    Args:
        path: its folder.
        meta: the contents of ``meta.json``.
    """

    path: Path
    meta: Mapping[str, Any]

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.path / f"{self.meta['library']}.so"


def folder() -> Path:
    """The cache folder: the configured one (CAKE_CACHE_DIR), else the user's cache folder. It needn't
    exist."""
    override = config.setting("cache_dir").value
    if override is not None:
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cake", appauthor=False))


def entry_name(library: str, key: str) -> str:
    """The name of an entry's folder."""
    return f"{library}-{key[:16]}"


def find(library: str, key: str) -> Entry | None:
    """The entry of exactly this build, or None where it is missing or its bytes aren't those that were
    published."""
    entry, _ = _read(folder() / "libraries" / entry_name(library, key))
    return entry if entry is not None and entry.meta["build_key"] == key else None


def find_any(library: str, source_key: str) -> Entry | None:
    """An entry built from the same sources and flags by whatever nvcc: the newest nvcc, then the least key,
    wins."""
    found = [
        entry
        for entry, _ in _scan(library)
        if entry is not None and entry.meta.get("source_key") == source_key
    ]
    return min(found, key=_preference, default=None)


def _preference(entry: Entry) -> tuple[list[int], str]:
    version = str(entry.meta.get("nvcc", {}).get("version", "0"))
    return [-int(part) if part.isdigit() else 0 for part in version.split(".")], str(entry.meta["build_key"])


def damage(library: str) -> str:
    """What is wrong with the library's entries that can't be used, for an error's text; "" where nothing
    is."""
    wrong = [f"{path.name}: {why}" for path, entry, why in entries() if entry is None and _of(path, library)]
    return f" (damaged: {'; '.join(wrong)})" if wrong else ""


def entries() -> list[tuple[Path, Entry | None, str]]:
    """(folder, entry or None, why not) of everything published, by name."""
    return [(path, entry, why) for path in _folders("") for entry, why in (_read(path),)]


def _scan(library: str) -> Iterator[tuple[Entry | None, str]]:
    for path in _folders(f"{library}-"):
        if _of(path, library):
            yield _read(path)


def _of(path: Path, library: str) -> bool:
    return path.name.rpartition("-")[0] == library


def _folders(prefix: str) -> list[Path]:
    try:
        return sorted(
            p for p in (folder() / "libraries").iterdir() if p.name.startswith(prefix) and p.is_dir()
        )
    except OSError:
        return []


def _read(path: Path) -> tuple[Entry | None, str]:
    """The checked entry of a folder, or None and what is wrong with it ("" where there is nothing)."""
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        size, digest = int(meta["library_size"]), str(meta["library_sha256"])
        entry = Entry(path, meta)
        data = entry.library.read_bytes()
        str(meta["source_key"]), str(meta["build_key"])
    except FileNotFoundError:
        return None, "a file is missing" if path.is_dir() else ""
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        return None, f"{META} is damaged"
    if len(data) != size:
        return None, f"the library has {len(data)} bytes, {size} were published"
    if hashlib.sha256(data).hexdigest() != digest:
        return None, "the library's sha256 is not the published one"
    return entry, ""


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
    try:
        for part in ("libraries", "locks", "tmp"):
            (root / part).mkdir(parents=True, exist_ok=True)
            if not os.access(root / part, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root / part))
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
    except BuildError:
        raise
    except OSError as error:
        if error.errno in _READ_ONLY:
            raise ReadOnlyError(
                f"{library} is not in the cache {root}{damage(library)}, which cannot be written to "
                f"({error.strerror}); set CAKE_CACHE_DIR to a folder of your own, or prebuild this one"
            ) from error
        if error.errno in _FULL:
            raise BuildError(
                f"no space left in the cache {root} while building {library}; free some, or set "
                "CAKE_CACHE_DIR to a folder on another disk"
            ) from error
        raise BuildError(
            f"the cache {root} is unusable ({error.strerror or error}) while building {library}; set "
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
    work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=root / "tmp"))
    try:
        work.chmod(0o755)  # mkdtemp's 0700 would hide the entry from the other users of a shared cache
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
            winner, why = _read(final)
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
                if library is not None and not _of(path, library):
                    continue
                if part == "tmp" and path.stat().st_mtime > time.time() - 3600:
                    continue
                size += size_of(path)
                shutil.rmtree(path)
                count += part == "libraries"
    return count, size


def size_of(path: Path) -> int:
    """Bytes of every file below ``path``."""
    total = 0
    for inside in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += inside.lstat().st_size
    return total
