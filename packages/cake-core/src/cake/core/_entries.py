"""What has been published: where it lies, and whether its bytes are still those that were published.

The cache folder comes first and is the only one that anything is written to. The folders of
CAKE_CACHE_READONLY_DIRS follow in their order: a cluster's shared cache, or one that an image brings along.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core import config

__all__ = [
    "META",
    "Entry",
    "damage",
    "entries",
    "entry_name",
    "find",
    "find_any",
    "folder",
    "folders",
    "read",
    "searched",
    "size_of",
]

META = "meta.json"


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


def folders() -> tuple[Path, ...]:
    """Every folder that is searched: the cache folder, then those of CAKE_CACHE_READONLY_DIRS. They needn't
    exist."""
    named = str(config.setting("cache_readonly_dirs").value or "").split(os.pathsep)
    more = (Path(name.strip()).expanduser().absolute() for name in named if name.strip())
    return tuple(dict.fromkeys((folder(), *more)))


def searched() -> str:
    """The folders that were searched, for an error's text."""
    own, *more = folders()
    beside = f" nor in the read-only {', '.join(map(str, more))}" if more else ""
    return f"the cache {own}{beside}"


def entry_name(library: str, key: str) -> str:
    """The name of an entry's folder."""
    return f"{library}-{key[:16]}"


def find(library: str, key: str) -> Entry | None:
    """The entry of exactly this build, or None where it is missing or its bytes aren't those that were
    published."""
    for root in folders():
        entry, _ = read(root / "libraries" / entry_name(library, key))
        if entry is not None and entry.meta["build_key"] == key:
            return entry
    return None


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
    wrong = [
        f"{path.name}: {why}" for path, entry, why in entries() if entry is None and is_of(path, library)
    ]
    return f" (damaged: {'; '.join(wrong)})" if wrong else ""


def entries() -> list[tuple[Path, Entry | None, str]]:
    """(folder, entry or None, why not) of everything published, by cache folder and name."""
    return [(path, entry, why) for path in _folders("") for entry, why in (read(path),)]


def _scan(library: str) -> Iterator[tuple[Entry | None, str]]:
    for path in _folders(f"{library}-"):
        if is_of(path, library):
            yield read(path)


def is_of(path: Path, library: str) -> bool:
    return path.name.rpartition("-")[0] == library


def _folders(prefix: str) -> Iterator[Path]:
    for root in folders():
        with contextlib.suppress(OSError):
            inside = sorted((root / "libraries").iterdir())
            yield from (path for path in inside if path.name.startswith(prefix) and path.is_dir())


def read(path: Path) -> tuple[Entry | None, str]:
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


def size_of(path: Path) -> int:
    """Bytes of every file below ``path``."""
    total = 0
    for inside in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += inside.lstat().st_size
    return total
