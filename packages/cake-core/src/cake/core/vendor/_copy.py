"""The forms that copy packages as they are: ``self``, ``fi``, and their removal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import _git
from ._check import check_module
from ._place import current, place
from ._table import (
    DEVICE_LIBRARY,
    FOLDER,
    PACKAGE_NOTICE,
    TABLE,
    VendorError,
    blob_id,
    check_name,
    notice_text,
    plain,
)
from ._where import module_folder

FI_PATH = "flashinfer/experimental"
"""Where FlashInfer's checkout keeps its Cake packages, unless ``NAME=PATH`` says otherwise."""


@dataclass(frozen=True)
class Copied:
    """What a form did: the folder, the commit, the packages, and whether anything changed."""

    folder: Path
    commit: str
    packages: tuple[str, ...]
    changed: bool


@dataclass
class Wanted:
    """One package of a form: where from, which files, and what it may do.

    Args:
        path: folder in the source checkout.
        include: patterns of the files to copy, relative to ``path``; all if empty. ``*`` crosses slashes.
        exclude: patterns of files to leave out.
        allow: "imports" -> modules, "environment" -> files that may read it.
        build_json: the text of a ``build.json`` for a package that brings none.
    """

    path: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    allow: dict[str, list[str]] = field(default_factory=dict)
    build_json: bytes | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the next copy has to do alike, as the table keeps it."""
        kept = {"include": list(self.include), "exclude": list(self.exclude)}
        return {name: value for name, value in kept.items() if value}


def vendor_self(op: str, repo: Path, commit: str | None = None, packages: Sequence[str] = ()) -> Copied:
    """Copy the repository's own ``kernels/`` into an op.

    The device library (kernels/include) always comes along, and so do the packages of this source that the op
    already carries: an op has one commit per source. ``_vendor`` is replaced as a whole or not at all.

    Args:
        op: a folder ``packages/cake-<op>`` of the checkout.
        repo: the checkout.
        commit: what to copy from; HEAD by default, and then what is copied must hold no uncommitted
            change.
        packages: further folders of ``kernels/``.

    Raises:
        VendorError: no such op, commit or package; uncommitted changes; a link or submodule among the files.
    """
    module = module_folder(op, repo)
    old = current(module)
    wanted = sorted({DEVICE_LIBRARY, *packages, *carried(old, "self", packages, op)})
    folders = {name: "kernels/include" if name == DEVICE_LIBRARY else f"kernels/{name}" for name in wanted}
    if commit is None:
        _git.refuse_dirty(repo, folders.values())
    exact = _git.commit_of(repo, commit)
    table = dict(old)
    contents: dict[str, bytes] = {}
    for name in wanted:
        path = "kernels" if name == DEVICE_LIBRARY else folders[name]
        files = _git.tree(repo, exact, path, "include" if name == DEVICE_LIBRARY else "")
        if not files:
            raise VendorError(f"commit {exact[:12]} has no files in {folders[name]}")
        bytes_of = {file: _git.blob(repo, blob) for file, blob in files.items()}
        table[name] = {"source": "self", "commit": exact, "path": path}
        put(name, table[name], bytes_of, contents)
    return finish(module, old, table, contents, wanted, commit)


def vendor_fi(
    op: str, repo: Path, checkout: Path, packages: Mapping[str, Wanted | None], commit: str | None = None
) -> Copied:
    """Copy Cake packages from a FlashInfer checkout, byte for byte.

    The packages that the op already has from there come along, with what was recorded for them: an op has one
    commit per source. ``_vendor`` is replaced as a whole or not at all.

    Args:
        op: a folder ``packages/cake-<op>`` of ``repo``.
        checkout: the git checkout to copy from.
        packages: package -> what is wanted of it; None takes what the table has, else its usual folder.
        commit: what to copy from; HEAD by default, and then what is copied must hold no uncommitted
            change.

    Raises:
        VendorError: no such op, commit or package; a package with CUDA sources and no ``build.json``;
            uncommitted changes; a link or submodule among the files; a copy that ``check`` wouldn't accept.
    """
    module = module_folder(op, repo)
    old = current(module)
    names = sorted({*packages, *carried(old, "fi", packages, op)})
    wanted = {name: recorded(old.get(name), packages.get(name), f"{FI_PATH}/{name}") for name in names}
    if commit is None:
        _git.refuse_dirty(checkout, [want.path for want in wanted.values()])
    exact = _git.commit_of(checkout, commit)
    table = dict(old)
    contents: dict[str, bytes] = {}
    for name, want in wanted.items():
        files = select(_git.tree(checkout, exact, want.path), want, name, exact)
        bytes_of = {file: _git.blob(checkout, blob) for file, blob in files.items()}
        entry = entry_of("fi", exact, want, name, files, checkout)
        if "build.json" not in files:
            text = want.build_json
            if text is None and "build.json" in old.get(name, {}).get("added", ()):
                text = (module / FOLDER / name / "build.json").read_bytes()
            if text is not None:
                bytes_of["build.json"] = text
                entry["added"] = ["build.json"]
            elif any(file.endswith(".cu") for file in files):
                raise VendorError(
                    f"{want.path} at {exact[:12]} has CUDA sources and no build.json, so nobody knows how to "
                    "build them; write one and say --build-json"
                )
        elif want.build_json is not None:
            raise VendorError(f"{want.path} at {exact[:12]} has its own build.json, which stays as it is")
        table[name] = entry
        put(name, entry, bytes_of, contents)
    return finish(module, old, table, contents, names, commit)


def remove(op: str, repo: Path, packages: Sequence[str]) -> Copied:
    """Take packages out of an op's ``_vendor``, all or none.

    Raises:
        VendorError: the op carries no such package, or something that stays needs one of them.
    """
    module = module_folder(op, repo)
    old = current(module)
    for name in packages:
        if name not in old:
            known = ", ".join(sorted(old)) or "none"
            raise VendorError(f"{op} carries no package {name!r}; it carries: {known}")
    table = {name: package for name, package in old.items() if name not in packages}
    place(module, table, {})
    return Copied(module / FOLDER, "", tuple(sorted(packages)), True)


# ---- what the forms share


def carried(
    old: Mapping[str, Any], source: str, packages: Sequence[str] | Mapping[str, Any], op: str
) -> set[str]:
    """The packages of a source that the op has.

    Raises:
        VendorError: a wanted package has a wrong name or is there from another source.
    """
    mine = {name for name, package in old.items() if package["source"] == source}
    for name in packages:
        check_name(name)
        if name in old and name not in mine:
            raise VendorError(f"package {name!r} of {op} comes from {old[name]['source']!r}; remove it first")
        if name == DEVICE_LIBRARY and source != "self":
            raise VendorError(f"package {name!r} is this repository's kernels/include; take another name")
    return mine


def recorded(entry: Mapping[str, Any] | None, given: Wanted | None, usual: str) -> Wanted:
    """What is wanted of a package: what was asked for now, else what the table recorded."""
    options = (entry or {}).get("options", {})
    allowed = {kind: list(names) for kind, names in (entry or {}).get("allow", {}).items()}
    want = given or Wanted("")
    for kind, names in want.allow.items():
        allowed[kind] = sorted({*allowed.get(kind, ()), *names})
    path = want.path or (entry["path"] if entry is not None else usual)
    if not plain(path):
        raise VendorError(f"a path must be relative to the checkout and plain, got {path!r}")
    include = want.include or tuple(options.get("include", ()))
    exclude = want.exclude or tuple(options.get("exclude", ()))
    return Wanted(path, include, exclude, allowed, want.build_json)


def select(files: Mapping[str, str], want: Wanted, name: str, commit: str) -> dict[str, str]:
    """The files that are wanted.

    Raises:
        VendorError: there are none, a pattern matches nothing, or a file may not be in a copy.
    """
    for pattern in (*want.include, *want.exclude):
        if not any(fnmatchcase(file, pattern) for file in files):
            raise VendorError(f"{pattern!r} matches no file of {want.path} at {commit[:12]}")
    found = {
        file: blob
        for file, blob in files.items()
        if (not want.include or any(fnmatchcase(file, p) for p in want.include))
        and not any(fnmatchcase(file, p) for p in want.exclude)
    }
    if not found:
        raise VendorError(f"commit {commit[:12]} has no files of package {name} in {want.path}")
    for file in found:
        if FOLDER in file.split("/") or file.rpartition("/")[2] == TABLE:
            raise VendorError(
                f"{want.path}/{file} is a copy inside a copy: copies are one level deep, so leave it out "
                "(--exclude) and vendor what it holds beside it"
            )
        if file == PACKAGE_NOTICE:
            raise VendorError(f"{want.path}/{file} has the name of cake's own notice")
    return found


def entry_of(
    source: str, commit: str, want: Wanted, name: str, files: Mapping[str, str], checkout: Path
) -> dict[str, Any]:
    """The table's entry of a package, without its files."""
    entry: dict[str, Any] = {"source": source, "commit": commit, "path": want.path}
    if any(file.endswith(".py") for file in files):
        entry["module"] = _git.module_name(checkout, commit, want.path)
    if want.options:
        entry["options"] = want.options
    if any(want.allow.values()):
        entry["allow"] = {kind: sorted(names) for kind, names in sorted(want.allow.items()) if names}
    return entry


def put(name: str, entry: dict[str, Any], files: Mapping[str, bytes], contents: dict[str, bytes]) -> None:
    """Add a package's files and its notice to the entry (ids) and to ``contents`` (bytes)."""
    everything = {**files, PACKAGE_NOTICE: notice_text(entry).encode()}
    entry["files"] = {file: blob_id(data) for file, data in sorted(everything.items())}
    contents.update({f"{name}/{file}": data for file, data in everything.items()})


def finish(
    module: Path,
    old: Mapping[str, Any],
    table: Mapping[str, Any],
    contents: Mapping[str, bytes],
    names: Sequence[str],
    commit: str | None,
) -> Copied:
    """Put the new ``_vendor`` in place, unless nothing but HEAD is new."""
    exact = table[names[0]]["commit"]
    same = all(name in old and _content(table[name]) == _content(old[name]) for name in names)
    if commit is None and same and not check_module(module):
        # Nothing is new since: the commit on record stays, so that copying twice changes nothing.
        return Copied(module / FOLDER, old[names[0]]["commit"], tuple(names), False)
    place(module, table, contents)
    return Copied(module / FOLDER, exact, tuple(names), table != old)


def _content(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without its commit, which alone is no reason for another copy."""
    files = {file: blob for file, blob in entry["files"].items() if file != PACKAGE_NOTICE}
    noted = PACKAGE_NOTICE in entry["files"]
    return {
        **{k: v for k, v in entry.items() if k not in ("commit", "files")},
        "files": files,
        "noted": noted,
    }
