"""Compiled libraries as one file: for an image, or for machines that have no compiler.

A zip file of plain files, the same bytes whenever it is made of the same entries::

    index.json                       ops, architectures, and size and sha256 of every other member
    libraries/<library>-<key16>/…    the entries, as they lie in the cache

Everything is checked before anything is published: an archive that is cut short, was changed, holds a member
that the index doesn't list, or names a place outside itself leaves the cache as it was. The hashes find
damage, not malice: an archive is native code and deserves the trust that a wheel does, so ``export_archive``
returns the sha256 of the whole, for ``import_archive`` to insist on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cake.core import build, cache, loader, registry, toolchain
from cake.core.errors import CakeError, NoBuildError, ToolchainError

__all__ = ["ArchiveError", "Exported", "Imported", "export_archive", "import_archive", "unready"]

SCHEMA = 1
KIND = "cake kernel archive"
INDEX = "index.json"
_TIME = (1980, 1, 1, 0, 0, 0)
_NAME = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}\Z")
_MOST = 2**32  # bytes of a member; a library has some 10 MiB


class ArchiveError(CakeError, ValueError):
    """A file that isn't a whole, unchanged archive of compiled libraries, or one that can't be made."""


@dataclass(frozen=True)
class Exported:
    """What ``export_archive`` wrote: the file, its size and sha256, and the names of the entries."""

    path: Path
    size: int
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Imported:
    """What ``import_archive`` found: ops and architectures the archive was made for, the entries, and which
    of them are new to the cache."""

    ops: tuple[str, ...]
    archs: tuple[str, ...]
    entries: tuple[cache.Entry, ...]
    new: tuple[str, ...]


# ---- writing


def export_archive(path: Path, archs: Sequence[str], ops: Sequence[str]) -> Exported:
    """Write the libraries that the installed ``ops`` use for ``archs`` into one file; builds nothing.

    With an nvcc here these are that nvcc's builds, else the newest that the caches hold.

    Args:
        path: written beside itself first and then renamed, so an older file is replaced whole or not at all.
        archs: in any spelling.
        ops: names of installed ops.

    Raises:
        ArchiveError: a library is missing from the caches, or the file can't be written.
        UnknownOpError: no such op.
        NotImplementedError: an op has no kernels for an architecture.
    """
    exact = tuple(sorted({toolchain.parse_arch(arch) for arch in archs}))
    entries: dict[str, cache.Entry] = {}
    missing: list[str] = []
    with loader.no_build():
        for op in ops:
            for arch in exact:
                for package, record in loader.libraries(op, arch):
                    try:
                        entry = loader.ensure(package, record)
                        entries[entry.path.name] = entry
                    except (NoBuildError, ToolchainError):
                        missing.append(f"{record.library} of {op} for {arch}")
    if missing:
        words = " ".join(["cake prebuild", *ops, *(f"--arch {arch}" for arch in exact)])
        raise ArchiveError(
            f"not in {cache.searched()}: {', '.join(missing)}; build them first with `{words}`"
        )
    members = {
        f"libraries/{name}/{file}": data
        for name, entry in sorted(entries.items())
        for file, data in _files(entry).items()
    }
    listing = {name: {"size": len(data), "sha256": _sha256(data)} for name, data in members.items()}
    index = {
        "kind": KIND,
        "schema": SCHEMA,
        "ops": sorted(ops),
        "archs": list(exact),
        "tvm_ffi": sorted({str(entry.meta["tvm_ffi"]) for entry in entries.values()}),
        "files": listing,
    }
    try:
        size, digest = _write(path, {INDEX: json.dumps(index, indent=1, sort_keys=True).encode(), **members})
    except OSError as error:
        raise ArchiveError(f"{path} can't be written ({error.strerror or error})") from error
    return Exported(path, size, digest, tuple(sorted(entries)))


def _files(entry: cache.Entry) -> dict[str, bytes]:
    inside = sorted(path for path in entry.path.rglob("*") if path.is_file())
    return {path.relative_to(entry.path).as_posix(): path.read_bytes() for path in inside}


def _write(path: Path, members: Mapping[str, bytes]) -> tuple[int, str]:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    half = Path(name)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for member, data in members.items():
                    info = zipfile.ZipInfo(member, _TIME)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.external_attr = 0o100644 << 16
                    archive.writestr(info, data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = _sha256_of(iter(lambda: file.read(1 << 20), b""))
            size = file.tell()
        umask = os.umask(0)
        os.umask(umask)
        half.chmod(0o666 & ~umask)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return size, digest


# ---- reading


def import_archive(path: Path, *, sha256: str | None = None) -> Imported:
    """Check an archive and publish its libraries in the cache folder.

    Args:
        path: the file.
        sha256: of the whole file, as ``cake cache export`` printed it; checked first where it is given.

    Raises:
        ArchiveError: the file can't be read, isn't such an archive, is of another schema, or a single byte,
            size, name or hash in it is wrong. Nothing was published.
        ReadOnlyError, BuildError: the cache can't be written to, or the disk is full. Nothing was published.
    """
    index, contents = read_archive(path, sha256)
    adopted = cache.adopt(contents)
    new = tuple(entry.path.name for entry, is_new in adopted if is_new)
    entries = tuple(entry for entry, _ in adopted)
    return Imported(tuple(index["ops"]), tuple(index["archs"]), entries, new)


def read_archive(path: Path, sha256: str | None = None) -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
    """The index and the files of each entry, every one of them checked.

    Raises:
        ArchiveError: as ``import_archive``.
    """
    try:
        if sha256 is not None:
            with path.open("rb") as file:
                found = _sha256_of(iter(lambda: file.read(1 << 20), b""))
            if found != sha256.strip().lower():
                raise ArchiveError(f"{path}: its sha256 is {found}, expected {sha256}")
        with zipfile.ZipFile(path) as archive:
            return _contents(path, archive)
    except CakeError:
        raise
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise ArchiveError(f"{path} is damaged, or is no archive of cake's ({error})") from error
    except OSError as error:
        raise ArchiveError(f"{path} can't be read ({error.strerror or error})") from error


def _contents(path: Path, archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
    """The index and the checked entries of an open archive."""

    def wrong(why: str) -> ArchiveError:
        return ArchiveError(f"{path}: {why}; nothing was imported")

    there = [info.filename for info in archive.infolist()]
    if len(set(there)) != len(there):
        raise wrong(f"member {next(name for name in there if there.count(name) > 1)!r} is there twice")
    if INDEX not in there:
        raise wrong(f"it has no {INDEX}, so it is no archive of cake's")
    index = _index(archive.read(INDEX), wrong)
    listed: dict[str, dict[str, Any]] = index["files"]
    for name in sorted(set(there) - set(listed) - {INDEX}):
        raise wrong(f"it holds {name!r}, which its index does not list")
    for name in sorted(set(listed) - set(there)):
        raise wrong(f"{name!r} is missing")
    contents: dict[str, dict[str, bytes]] = {}
    for name, said in listed.items():
        parts = PurePosixPath(name).parts
        plain = "/".join(parts) == name and "\\" not in name and ".." not in parts
        if not plain or len(parts) < 3 or parts[0] != "libraries" or not _NAME.match(parts[1]):
            raise wrong(f"{name!r} is no file of a library")
        info = archive.getinfo(name)
        if info.file_size != said["size"] or info.file_size > _MOST:
            raise wrong(f"{name!r} has {info.file_size} bytes, its index says {said['size']}")
        data = archive.read(name)
        if len(data) != said["size"] or _sha256(data) != said["sha256"]:
            raise wrong(f"{name!r} is not what its index says (sha256)")
        contents.setdefault(parts[1], {})["/".join(parts[2:])] = data
    for name, files in contents.items():
        why = _trouble(name, files, index["archs"])
        if why:
            raise wrong(f"libraries/{name}: {why}")
    return index, contents


def _index(data: bytes, wrong: Any) -> dict[str, Any]:
    try:
        index = json.loads(data)
    except ValueError as error:
        raise wrong(f"{INDEX} is not JSON ({error})") from error
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise wrong(f"{INDEX} is not that of a {KIND}")
    if index.get("schema") != SCHEMA:
        raise wrong(
            f"it is of schema {index.get('schema')!r} and this cake-core reads {SCHEMA}; use the cake-core "
            "that wrote it, or a newer one"
        )
    for field in ("ops", "archs"):
        value = index.get(field)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wrong(f"{INDEX}: {field} must be a list of texts, got {value!r}")
    files = index.get("files")
    if not isinstance(files, dict) or not files or not all(_is_file(said) for said in files.values()):
        raise wrong(f"{INDEX}: files must give size and sha256 of at least one file")
    return index


def _is_file(said: Any) -> bool:
    return (
        isinstance(said, dict)
        and set(said) == {"size", "sha256"}
        and isinstance(said["size"], int)
        and isinstance(said["sha256"], str)
    )


def _trouble(name: str, files: Mapping[str, bytes], archs: Sequence[str]) -> str:
    """What is wrong with an entry, whose files are those that the index lists; "" where nothing is."""
    try:
        meta = json.loads(files[cache.META])
        library, key = str(meta["library"]), str(meta["build_key"])
        data = files[f"{library}.so"]
        said = (meta["library_size"], meta["library_sha256"], meta["arch"], str(meta["source_key"]))
        str(meta["nvcc"]["version"])
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (ValueError, TypeError):
        return f"{cache.META} can't be read"
    if cache.entry_name(library, key) != name:
        return f"{cache.META} is that of {cache.entry_name(library, key)}"
    if said[:2] != (len(data), _sha256(data)):
        return f"{library}.so is not the one that {cache.META} describes"
    if said[2] not in archs:
        return f"it is for {said[2]}, and the archive for {', '.join(archs)}"
    return ""


def unready(ops: Iterable[str], archs: Iterable[str]) -> list[str]:
    """Which libraries of those ``ops`` that are installed no cache holds, whatever nvcc built them."""
    missing = []
    installed = {spec.name for spec in registry.ops()}
    for op in ops:
        for arch in archs:
            if op not in installed:
                continue
            with suppress(NotImplementedError):
                for package, record in loader.libraries(op, arch):
                    source = build.source_key(package, record, build.source_files(package, record))
                    if cache.find_any(record.library, source) is None:
                        missing.append(f"{record.library} of {op} for {arch}")
    return missing


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha256_of(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()
