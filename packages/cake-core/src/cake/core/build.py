"""Reads ``build.json``, closes over its headers, and names a build by its content.

A kernel package is a folder with a ``build.json``::

    {
        "schema": 1,
        "include": ["../_vendor/cake/include"],
        "records": [
            {
                "library": "gdn_prep",
                "arch": "sm_90a",
                "sources": ["gdn_prep.cu"],
                "flags": ["-O3"],
                "functions": ["gdn_prep"],
                "allow": {"spills": ["gdn_prep_kernel"]},
            }
        ],
    }

``include`` folders and the package folder are all that an ``#include`` may reach, apart from the toolkit's,
the standard library's and tvm-ffi's headers. What is reached is copied into an empty folder and compiled
there by relative names, so a header that the scan missed fails the compile instead of escaping the key, and
the library's bytes hold no path of the machine that built it.

The key covers bytes and names inside the package, exact flags, architecture and tvm-ffi version
(``source_key``) and nvcc's version (``build_key``): never paths or times. The host compiler is recorded but
isn't in the key: the device code, which decides an op's bits, doesn't depend on it, and a machine without
one must find what another prebuilt.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cake.core.errors import BuildError, ToolchainError
from cake.core.spec import KernelPackage
from cake.core.toolchain import Nvcc, parse_arch

__all__ = [
    "SCHEMA",
    "Package",
    "Record",
    "build_key",
    "command",
    "content_hash",
    "read_package",
    "source_files",
    "source_key",
]

SCHEMA = 1
COMMON_FLAGS = ("-std=c++17", "--shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v,-warn-spills")
LINK_FLAGS = ("-L", "tvm_ffi/lib", "-ltvm_ffi", "-Xlinker", "-z,defs")
TVM_FFI = "tvm_ffi"  # the name of the link to the installed package inside a build folder

_LIBRARY = re.compile(r"[a-z][a-z0-9_]*\Z")
_FUNCTION = re.compile(r"[A-Za-z_]\w*\Z")
_RECORD_FIELDS = ("library", "arch", "sources", "flags", "functions", "allow", "link")
_TVM_FFI_HEADERS = ('"tvm/', '"dlpack/')  # in the key by tvm-ffi's version, however they are included
_LIBRARIES = ("cuda",)  # what a record may link besides: the driver
# Flags that name files or folders, or that this module sets itself, would let a build depend on what isn't
# in its key.
_REFUSED_FLAGS = re.compile(
    r"[^/]*/|-I|-L|-l(?!ineinfo)|-o|-isystem|-include|-ccbin|-arch|-code|-gencode|-optf|-std|-x|-shared|-c\Z|-E\Z|-M|-keep"
    r"|--(include-path|system-include|pre-include|output|library|compiler-bindir|gpu-|generate-code|options-file|std|shared"
    r"|keep|objdir|compile|preprocess|dryrun|run)"
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(include(?:_next)?|import)\b[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_OPERAND = re.compile(r'(?:"([^"\n]+)"|<([^>\n]+)>)[ \t]*\Z')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


@dataclass(frozen=True)
class Record:
    """One library for one architecture.

    Args:
        library: its name; ``<library>.so`` in the cache.
        arch: ``sm_90a``.
        sources: .cu files, relative to the package folder.
        flags: flags of this record, after the common ones.
        functions: what the library exports; checked when it is loaded.
        allow: kind of compiler remark ("spills", "serialized" or a code like "C7519") -> kernel names that
            may have it ("*": any).
        link: further libraries: "cuda" is the driver, for sources that call it.
    """

    library: str
    arch: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    allow: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    link: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """A kernel package as read from disk.

    Args:
        root: its folder, which holds ``build.json``.
        include: include folders relative to ``root.parent``, with forward slashes.
        records: in the file's order.
    """

    root: Path
    include: tuple[str, ...]
    records: tuple[Record, ...]

    def record(self, library: str, arch: str) -> Record | None:
        """The record of ``library`` for ``arch``, or None."""
        return next((r for r in self.records if r.library == library and r.arch == arch), None)


def read_package(where: KernelPackage | Path | str) -> Package:
    """Read and check ``build.json``.

    Raises:
        BuildError: it is missing, isn't JSON, or a field is wrong; ``source`` is its path.
        FileNotFoundError: the module that holds the package isn't installed.
    """
    root = where.root() if isinstance(where, KernelPackage) else Path(where)
    path = root / "build.json"

    def wrong(why: str) -> BuildError:
        return BuildError(f"build.json of {root.name}: {why}", source=str(path))

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise wrong(f"is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise wrong(
            f"schema must be {SCHEMA}, got {data.get('schema')!r}"
            if isinstance(data, dict)
            else "must be an object"
        )
    unknown = sorted(set(data) - {"schema", "include", "records"})
    if unknown:
        raise wrong(f"unknown fields {unknown}")
    include = []
    for folder in _strings(data.get("include", []), "include", wrong):
        inside = posixpath.normpath(posixpath.join(root.name, folder))
        if posixpath.isabs(folder) or inside == ".." or inside.startswith("../"):
            raise wrong(f"include folder {folder!r} leaves {root.parent.name or root.parent}")
        include.append(inside)
    records: list[Record] = []
    items = data.get("records")
    if not isinstance(items, list) or not items:
        raise wrong("records must be a list of at least one object")
    for item in items:
        record = _record(item, wrong)
        if any((r.library, r.arch) == (record.library, record.arch) for r in records):
            raise wrong(f"two records of library {record.library!r} for {record.arch}")
        records.append(record)
    return Package(root, tuple(include), tuple(records))


def _record(item: Any, wrong: Any) -> Record:
    if not isinstance(item, dict):
        raise wrong(f"a record must be an object, got {item!r}")
    library = item.get("library")
    if not isinstance(library, str) or not _LIBRARY.match(library):
        raise wrong(f"a record's library must be a lower-case identifier, got {library!r}")
    unknown = sorted(set(item) - set(_RECORD_FIELDS))
    if unknown:
        raise wrong(f"record {library!r} has unknown fields {unknown}")
    arch = item.get("arch")
    try:
        exact = isinstance(arch, str) and parse_arch(arch) == arch
    except ValueError:
        exact = False
    if not exact:
        raise wrong(f"record {library!r}: arch must be spelled like 'sm_90a', got {arch!r}")
    sources = _strings(item.get("sources"), f"record {library!r}: sources", wrong)
    for source in sources:
        if posixpath.isabs(source) or posixpath.normpath(source) != source or source.startswith("../"):
            raise wrong(f"record {library!r}: source {source!r} must be a plain path inside the package")
    if not sources or len({posixpath.basename(s) for s in sources}) != len(sources):
        raise wrong(
            f"record {library!r}: sources must be at least one file, each with its own name, got {sources}"
        )
    flags = _strings(item.get("flags", []), f"record {library!r}: flags", wrong)
    for flag in flags:
        if _REFUSED_FLAGS.match(flag):
            raise wrong(
                f"record {library!r}: flag {flag!r} names a path or is set by cake, so a record can't have it"
            )
    functions = _strings(item.get("functions", []), f"record {library!r}: functions", wrong)
    if not all(_FUNCTION.match(f) for f in functions):
        raise wrong(f"record {library!r}: functions must be identifiers, got {functions}")
    allow = item.get("allow", {})
    if not isinstance(allow, dict):
        raise wrong(f"record {library!r}: allow must be an object of lists of kernel names, got {allow!r}")
    allowed = {
        kind: tuple(_strings(names, f"record {library!r}: allow.{kind}", wrong))
        for kind, names in allow.items()
    }
    link = tuple(_strings(item.get("link", []), f"record {library!r}: link", wrong))
    if set(link) - set(_LIBRARIES):
        raise wrong(f"record {library!r}: link may name {', '.join(_LIBRARIES)} alone, got {list(link)}")
    frozen = MappingProxyType(allowed)
    return Record(library, str(arch), tuple(sources), tuple(flags), tuple(functions), frozen, link)


def _strings(value: Any, what: str, wrong: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise wrong(f"{what} must be a list of strings, got {value!r}")
    return value


# ---- the include closure


def source_files(package: Package, record: Record) -> dict[str, bytes]:
    """Every file that the compile may read from the package, by its name relative to
    ``package.root.parent``, sorted.

    Raises:
        BuildError: a source or header can't be read, or an ``#include`` isn't a plain name that resolves
            inside the
            package and its include folders; the message gives file and line.
    """
    base = package.root.parent
    roots = (package.root.name, *package.include)
    found: dict[str, bytes] = {}
    waiting = [posixpath.join(package.root.name, source) for source in record.sources]
    for name in waiting:
        if not (base / name).is_file():
            raise BuildError(f"{record.library}: source {name} does not exist", source=str(base / name))
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = (base / name).read_bytes()
        except OSError as error:
            raise BuildError(
                f"{record.library}: {name} cannot be read ({error.strerror})", source=str(base / name)
            ) from error
        for line, directive, operand in _includes(found[name]):
            inside = _resolve(base, roots, name, directive, operand)
            if inside is not None:
                waiting.append(inside)
            elif directive != "include" or not operand.startswith(("<", *_TVM_FFI_HEADERS)):
                folders = ", ".join((posixpath.dirname(name), *roots))
                raise BuildError(
                    f"{record.library}: {name}:{line}: #{directive} {operand} is not a file of the package "
                    f"(looked in {folders})",
                    source=str(base / name),
                )
    return dict(sorted(found.items()))


def _includes(text: bytes) -> Iterator[tuple[int, str, str]]:
    """(line, directive, operand) of every include directive outside comments, conditional or not."""
    source = text.decode("utf-8", errors="surrogateescape").replace("\\\r\n", " ").replace("\\\n", " ")

    def blank(match: re.Match[str]) -> str:
        whole = match.group()
        return whole if whole.startswith('"') else re.sub(r"[^\n]", " ", whole)

    source = _COMMENT.sub(blank, source)
    for match in _INCLUDE.finditer(source):
        yield source.count("\n", 0, match.start()) + 1, match.group(1), match.group(2)


def _resolve(base: Path, roots: tuple[str, ...], including: str, directive: str, operand: str) -> str | None:
    match = _OPERAND.match(operand)
    if match is None or directive != "include":
        return None
    quoted, angled = match.groups()
    folders = roots if quoted is None else (posixpath.dirname(including), *roots)
    for folder in folders:
        inside = posixpath.normpath(posixpath.join(folder, quoted or angled))
        if any(inside.startswith(root + "/") for root in roots) and (base / inside).is_file():
            return inside
    return None


# ---- flags, command and keys


def compile_flags(package: Package, record: Record) -> tuple[str, ...]:
    """Every flag of the compile, with paths relative to the build folder; part of the key."""
    number = record.arch[3:]
    gencode = ("-gencode", f"arch=compute_{number},code={record.arch}")
    include = tuple(
        part
        for folder in (package.root.name, *package.include, f"{TVM_FFI}/include")
        for part in ("-I", folder)
    )
    return (*COMMON_FLAGS, *gencode, *record.flags, *include)


def link_flags(record: Record) -> tuple[str, ...]:
    """Every flag of the link; part of the key. The driver's symbols are found when it is loaded: no stub."""
    return LINK_FLAGS[:3] if record.link else LINK_FLAGS


def command(package: Package, record: Record, nvcc: Path, host: Path) -> list[str]:
    """The compiler's command line, to be run inside the build folder."""
    sources = [posixpath.join(package.root.name, source) for source in record.sources]
    return [
        str(nvcc),
        "-ccbin",
        str(host),
        *compile_flags(package, record),
        *sources,
        *link_flags(record),
        "-o",
        f"{record.library}.so",
    ]


def tvm_ffi_version() -> str:
    """The installed version of apache-tvm-ffi.

    Raises:
        ToolchainError: it isn't installed.
    """
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError as error:
        raise ToolchainError(
            "apache-tvm-ffi is not installed; pip install 'apache-tvm-ffi>=0.1.11,<0.2'"
        ) from error


def tvm_ffi_root() -> Path:
    """The folder of the package tvm_ffi, found without importing it (which would import torch).

    Raises:
        ToolchainError: it isn't installed, or has no headers.
    """
    spec = importlib.util.find_spec(TVM_FFI)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if Path(location, "include").is_dir() and Path(location, "lib").is_dir():
            return Path(location)
    raise ToolchainError(
        "apache-tvm-ffi with its headers is not installed; pip install 'apache-tvm-ffi>=0.1.11,<0.2'"
    )


def source_key(package: Package, record: Record, files: Mapping[str, bytes]) -> str:
    """sha256 (hex) over everything that decides the library but the compiler: the same on every machine."""
    return _digest(
        {
            "schema": SCHEMA,
            "library": record.library,
            "arch": record.arch,
            "sources": record.sources,
            "flags": [*compile_flags(package, record), *link_flags(record)],
            "functions": record.functions,
            "allow": {kind: list(names) for kind, names in sorted(record.allow.items())},
            "tvm_ffi": tvm_ffi_version(),
            "files": [[name, hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())],
        }
    )


def build_key(source: str, nvcc: Nvcc) -> str:
    """sha256 (hex) over a source key and the compiler's version."""
    return _digest({"source": source, "nvcc": nvcc.identity})


def content_hash(where: KernelPackage | Path | str) -> str:
    """sha256 (hex) over a package's ``build.json``, every file that its records reach, and its host modules.

    It names the kernels for a run's log and for ``configure(require=...)``: equal for an editable checkout
    and a wheel with the same bytes, whatever compiler, cache or machine.

    Raises:
        BuildError: as ``read_package`` and ``source_files``.
    """
    package = read_package(where)
    files = {f"{package.root.name}/build.json": (package.root / "build.json").read_bytes()}
    for record in package.records:
        files.update(source_files(package, record))
    for path in package.root.rglob("*.py"):
        files[path.relative_to(package.root.parent).as_posix()] = path.read_bytes()
    return _digest([[name, hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
