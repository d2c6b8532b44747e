"""Compares the copies of ops with their tables, from the files alone: no git, no history, no network."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cake.core.errors import BuildError

from ._sources import wrong_sources
from ._table import (
    FOLDER,
    NOTICE,
    NOTICE_TEXT,
    PACKAGE_NOTICE,
    TABLE,
    VendorError,
    blob_id,
    notice_text,
    read_table,
)
from ._where import known_ops, module_folder

__all__ = ["check", "check_folder", "check_module"]


def check(ops: Iterable[str] = (), repo: Path | None = None) -> dict[str, list[str]]:
    """Compare the copies of ops with their tables. Needs no git.

    Args:
        ops: which; all of the checkout, or all installed ones, if none is named.
        repo: a checkout to look in; None looks at what is installed.

    Returns:
        op -> what is wrong, one sentence per file; empty lists where all is well.
    """
    return {op: check_module(module_folder(op, repo)) for op in (tuple(ops) or known_ops(repo))}


def check_module(module: Path) -> list[str]:
    """What is wrong in one op: its ``_vendor``, every ``build.json``, and copies that nothing declares."""
    folder = module / FOLDER
    wrong = check_folder(folder, module)
    for path in sorted(module.glob("*/build.json")):
        wrong += _wrong_build(path)
    try:
        table = read_table(folder)
    except VendorError:
        return wrong  # said already
    declared = _declared(module / "spec.py")
    for name, package in sorted(table.items()):
        needs = package["source"] != "self" and "build.json" in package["files"]
        if needs and declared is not None and f"{FOLDER}/{name}" not in declared:
            wrong.append(
                f"{folder / name} has kernels that {module / 'spec.py'} doesn't declare: "
                f"KernelPackage({name!r}, ..., path='{FOLDER}/{name}')"
            )
    return wrong


def check_folder(folder: Path, module: Path | None = None) -> list[str]:
    """What is wrong in one ``_vendor``: exact file set, blob ids, notices, one commit per source, each
    ``build.json``, and what its sources import and read.

    Args:
        module: the folder of the op's module; the one around ``folder`` if not given.
    """
    if not folder.exists():
        return [
            f"{folder} is missing, and {left} is what a killed copy left of it; rename it back, or copy again"
            for left in interrupted(folder)
            if "-old-" in left.name
        ]
    try:
        table = read_table(folder)
    except VendorError as error:
        return [str(error)]
    if not table:
        return [f"{folder / TABLE} is missing or lists nothing"]
    wrong, present = _wrong_files(folder, table)
    for source in sorted({package["source"] for package in table.values()}):
        commits = sorted({package["commit"] for package in table.values() if package["source"] == source})
        if len(commits) > 1:
            wrong.append(
                f"{folder / TABLE}: source {source!r} comes from {len(commits)} commits: {', '.join(commits)}"
            )
    for name in sorted(present):
        if posixpath.basename(name) == "build.json":
            wrong += _wrong_build(folder / name)
    return wrong + wrong_sources(folder, f"cake.{(module or folder.parent).name}", table)


def interrupted(folder: Path) -> list[Path]:
    """What copies that were killed have left beside a ``_vendor``: unfinished new ones, and the old one."""
    return sorted(path for kind in ("new", "old") for path in folder.parent.glob(f".{FOLDER}-{kind}-*"))


def _wrong_files(folder: Path, table: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    wrong = []
    listed = {
        f"{name}/{file}": blob for name, package in table.items() for file, blob in package["files"].items()
    }
    listed[NOTICE] = blob_id(NOTICE_TEXT.encode())
    present = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and "__pycache__" not in path.parts
    }
    for name in sorted({*listed, *present} - {TABLE}):
        path = folder / name
        if name not in present:
            wrong.append(f"{path} is missing")
        elif name not in listed:
            wrong.append(f"{path} is not in {TABLE}")
        elif path.is_symlink():
            wrong.append(f"{path} is a link")
        elif (found := blob_id(path.read_bytes())) != listed[name]:
            wrong.append(f"{path} was changed: its blob is {found}, {TABLE} says {listed[name]}")
    for name, package in table.items():
        noted = package["files"].get(PACKAGE_NOTICE)
        if noted is not None and noted != blob_id(notice_text(package).encode()):
            wrong.append(
                f"{folder / name / PACKAGE_NOTICE} doesn't say what {TABLE} says of {name}'s source, "
                f"path and commit {package['commit']}: one of them was changed by hand"
            )
    return wrong, present


def _wrong_build(path: Path) -> list[str]:
    from cake.core import build

    try:
        package = build.read_package(path.parent)
        for record in package.records:
            build.source_files(package, record)
    except BuildError as error:
        return [f"{error.source or path}: {error.args[0]}"]
    return []


def _declared(spec: Path) -> set[str] | None:
    """The paths of the kernel packages that a declaration names, read without running it; None where there is
    no declaration."""
    try:
        tree = ast.parse(spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    found = set()
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", None) or getattr(node.func, "attr", None))
        in ("KernelPackage", "OpSpec")
    ]
    for call in calls:
        named = [keyword.value for keyword in call.keywords if keyword.arg == "path"]
        for value in (*named, *call.args[2:3]):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.add(posixpath.normpath(value.value))
    return found if calls else None
