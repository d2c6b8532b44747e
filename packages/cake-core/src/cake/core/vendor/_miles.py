"""The form ``miles-pr``: sources that a pull request generated, with the ``build.json`` that they lack.

The folder of such a package holds ``registry.json`` and ``csrc/``. Of the registry only this is read::

    {"programs": {"<name>": {"sources": ["<package>/a_kernel.cu", ...],    below csrc/; or {"sm_100a": [...]}
                             "arches": ["sm_100a", "sm_103a"],             or "arch": "sm_100a"
                             "compile_flags": [],
                             "ffi_entry": "run",
                             "kernel": "kernel_<name>"}}}

Each program becomes one record for each of its architectures.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cake.core.toolchain import parse_arch

from . import _git
from ._copy import Copied, Wanted, carried, entry_of, finish, put, recorded, select
from ._place import current
from ._table import VendorError, plain
from ._where import module_folder

__all__ = ["Generated", "vendor_miles_pr"]

REGISTRY = "registry.json"
_LEGAL = re.compile(r"(LICENSE|NOTICE|COPYING)[^/]*\Z")
_PROGRAM = re.compile(r"[a-z][a-z0-9_]*\Z")
_PLACEHOLDER = re.compile(r"@([a-z]+)@")


@dataclass
class Generated:
    """What ``vendor_miles_pr`` is to make of a package.

    Args:
        files: where from and which files.
        host_shim: pattern of files that are left out -> the template that takes their place and name; a path
            inside the op's checkout. In it @package@, @program@, @kernel@ and @entry@ are replaced; a file
            that no program lists, or several do, knows only @package@.
        arch_from: architecture -> the one whose sources it is compiled from where the registry has none.
        include: include folders of the ``build.json``, besides ``csrc``; "../cake/include" is the device
            library.
        link: libraries that every record links: "cuda", the driver.
        allow: compiler remarks that every record accepts: "spills", "serialized", "C7519".
    """

    files: Wanted
    host_shim: dict[str, str] = field(default_factory=dict)
    arch_from: dict[str, str] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """What the next copy has to do alike, as the table keeps it."""
        kept = {
            "host_shim": self.host_shim,
            "arch_from": self.arch_from,
            "include_folders": list(self.include),
            "link": list(self.link),
            "allow_remarks": list(self.allow),
        }
        return {**self.files.options, **{name: value for name, value in kept.items() if value}}


@dataclass(frozen=True)
class _Program:
    name: str
    kernel: str
    entry: str
    flags: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]  # arch -> files, relative to the package


def vendor_miles_pr(
    op: str, repo: Path, checkout: Path, packages: Mapping[str, Generated | None], commit: str | None = None
) -> Copied:
    """Copy generated packages from a checkout of a pull request, and generate their ``build.json``.

    The packages that the op already has from such a source come along, with what was recorded for them: an op
    has one commit per source. ``_vendor`` is replaced as a whole or not at all.

    Args:
        op: a folder ``packages/cake-<op>`` of ``repo``.
        checkout: the git checkout to copy from.
        packages: package -> what to make of it; None does what the table has.
        commit: what to copy from; HEAD by default, and then what is copied must hold no uncommitted
            change.

    Raises:
        VendorError: no such op, commit or package; a registry that can't be read; a template with other
            placeholders; uncommitted changes; a link or submodule among the files; a copy that ``check``
            wouldn't accept.
    """
    module = module_folder(op, repo)
    old = current(module)
    names = sorted({*packages, *carried(old, "miles-pr", packages, op)})
    wanted = {name: _recorded(old.get(name), packages.get(name), name) for name in names}
    if commit is None:
        _git.refuse_dirty(checkout, [want.files.path for want in wanted.values()])
    exact = _git.commit_of(checkout, commit)
    table = dict(old)
    contents: dict[str, bytes] = {}
    for name, want in wanted.items():
        path = want.files.path
        there = {file: blob for file, blob in _git.tree(checkout, exact, path).items() if belongs(file)}
        if REGISTRY not in there:
            raise VendorError(f"{path} at {exact[:12]} has no {REGISTRY}")
        programs = _programs(_git.blob(checkout, there[REGISTRY]), f"{path}/{REGISTRY}", there)
        shims = _shims(want, there, programs, f"{path} at {exact[:12]}")
        chosen = {**select(there, want.files, name, exact), REGISTRY: there[REGISTRY]}
        replaced = [f for f in chosen if any(fnmatchcase(f, pattern) for pattern in want.host_shim)]
        files = {file: blob for file, blob in chosen.items() if file not in replaced}
        bytes_of = {file: _git.blob(checkout, blob) for file, blob in files.items()}
        made = {file: _render(repo, template, file, name, programs) for file, template in shims.items()}
        records = _records(programs, {*files, *made}, want, f"{path}/{REGISTRY}")
        build = {"schema": 1, "include": ["csrc", *want.include], "records": records}
        made["build.json"] = (json.dumps(build, indent=2) + "\n").encode()
        entry = entry_of("miles-pr", exact, want.files, name, files, checkout)
        entry.update({"options": want.options} if want.options else {}, added=sorted(made))
        table[name] = entry
        put(name, entry, {**bytes_of, **made}, contents)
    return finish(module, old, table, contents, names, commit)


def belongs(file: str) -> bool:
    """Whether a file of the package's folder is part of the package: its registry, sources and licences."""
    return file == REGISTRY or file.startswith("csrc/") or _LEGAL.match(file) is not None


def _recorded(entry: Mapping[str, Any] | None, given: Generated | None, name: str) -> Generated:
    if entry is None and (given is None or not given.files.path):
        raise VendorError(f"package {name} is new, so say where it is: {name}=FOLDER")
    options = (entry or {}).get("options", {})
    want = given or Generated(Wanted(""))
    made = Generated(
        recorded(entry, want.files, ""),
        want.host_shim or dict(options.get("host_shim", {})),
        want.arch_from or dict(options.get("arch_from", {})),
        want.include or tuple(options.get("include_folders", ())),
        want.link or tuple(options.get("link", ())),
        want.allow or tuple(options.get("allow_remarks", ())),
    )
    for new, present in made.arch_from.items():
        for arch in (new, present):
            if not _exact(arch):
                raise VendorError(f"--arch-from must be like sm_107a=sm_103a, got {new}={present}")
    return made


def _plain(name: Any) -> bool:
    return isinstance(name, str) and plain(name)


def _exact(arch: Any) -> bool:
    try:
        return isinstance(arch, str) and parse_arch(arch) == arch
    except ValueError:
        return False


# ---- the registry


def _programs(data: bytes, where: str, files: Mapping[str, str]) -> list[_Program]:
    try:
        registry = json.loads(data)
    except ValueError as error:
        raise VendorError(f"{where} isn't JSON ({error})") from error
    programs = registry.get("programs") if isinstance(registry, dict) else None
    if not isinstance(programs, dict) or not programs:
        raise VendorError(f"{where} must be an object with at least one of programs")
    return [_program(name, item, where, files) for name, item in sorted(programs.items())]


def _program(name: str, item: Any, where: str, files: Mapping[str, str]) -> _Program:
    def wrong(why: str) -> VendorError:
        return VendorError(f"{where}: program {name!r} {why}")

    if not _PROGRAM.match(name):
        raise wrong("must be a lower-case identifier, since it names a library")
    if not isinstance(item, dict):
        raise wrong(f"must be an object, got {item!r}")
    archs = item.get("arches", [item["arch"]] if "arch" in item else None)
    if not isinstance(archs, list) or not archs or not all(_exact(arch) for arch in archs):
        raise wrong(f"must have arches like ['sm_103a'] (or arch), got {archs!r}")
    flags = item.get("compile_flags", [])
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        raise wrong(f"must have a list of texts for compile_flags, got {flags!r}")
    entry, kernel = item.get("ffi_entry", "run"), item.get("kernel", f"kernel_{name}")
    if not isinstance(entry, str) or not isinstance(kernel, str):
        raise wrong("must have texts for ffi_entry and kernel")
    sources = item.get("sources")
    listed = sources if isinstance(sources, dict) else dict.fromkeys(archs, sources)
    found = {}
    for arch in archs:
        value = listed.get(arch)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(map(_plain, names)):
            raise wrong(f"must have plain paths for its sources of {arch}, got {value!r}")
        for source in names:
            if f"csrc/{source}" not in files and source not in files:
                raise wrong(f"lists the source {source!r}, which {posixpath.dirname(where)} doesn't have")
        found[arch] = tuple(f"csrc/{n}" if f"csrc/{n}" in files else n for n in names)
    return _Program(name, kernel, entry, tuple(flags), found)


def _records(programs: list[_Program], files: set[str], want: Generated, where: str) -> list[dict[str, Any]]:
    """A record for each program and architecture whose sources are all among ``files``."""
    records = []
    served = set()
    for program in programs:
        sources = dict(program.sources)
        for new, present in want.arch_from.items():
            if present in sources:
                sources.setdefault(new, sources[present])
        for arch, names in sorted(sources.items()):
            if set(names) <= files:
                served.add(arch)
                record: dict[str, Any] = {"library": program.name, "arch": arch, "sources": list(names)}
                record.update({"flags": list(program.flags), "functions": [program.entry]})
                record.update({"link": list(want.link)} if want.link else {})
                record.update({"allow": {kind: ["*"] for kind in want.allow}} if want.allow else {})
                records.append(record)
    if not records:
        raise VendorError(f"{where}: no program has all its sources among the files that are copied")
    for new, present in want.arch_from.items():
        if new not in served:
            raise VendorError(f"{where}: no program for {new} comes of --arch-from {new}={present}")
    return records


# ---- the host shim


def _shims(want: Generated, files: Iterable[str], programs: list[_Program], where: str) -> dict[str, str]:
    """file -> the template in its place, of the files that the package includes and somebody compiles."""
    shims = {}
    for pattern, template in want.host_shim.items():
        matched = [file for file in files if fnmatchcase(file, pattern)]
        if not matched:
            raise VendorError(f"{pattern!r} (--host-shim) matches no file of {where}")
        shims.update(dict.fromkeys(matched, template))
    include = want.files.include
    listed = {file for program in programs for names in program.sources.values() for file in names}
    return {
        file: template
        for file, template in shims.items()
        if (file in listed or not file.endswith(".cu"))
        and (not include or any(fnmatchcase(file, pattern) for pattern in include))
    }


def _render(repo: Path, template: str, file: str, package: str, programs: list[_Program]) -> bytes:
    if not plain(template) or not (repo / template).is_file():
        raise VendorError(f"a host-shim template must be a file inside {repo}, got {template!r}")
    text = (repo / template).read_bytes().decode("utf-8")
    values = {"package": package}
    users = [p for p in programs if any(file in names for names in p.sources.values())]
    if len(users) == 1:
        values.update(program=users[0].name, kernel=users[0].kernel, entry=users[0].entry)

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = match[1] in ("program", "kernel", "entry")
            why = f"has no value, since {len(users)} programs list that file" if known else "is unknown"
            raise VendorError(f"{template} can't be put in place of {file}: {match.group()} {why}")
        return values[match[1]]

    return _PLACEHOLDER.sub(value, text).encode()
