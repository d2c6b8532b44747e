"""Compares recorded copies with the trees of the commits that they are said to come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import _git
from ._copy import Wanted, select
from ._miles import REGISTRY, belongs
from ._table import DEVICE_LIBRARY, FOLDER, TABLE, VendorError, read_table, upstream_files
from ._where import known_ops, module_folder

__all__ = ["check_upstream"]


def check_upstream(
    ops: Iterable[str], repo: Path, checkouts: Mapping[str, Path]
) -> tuple[dict[str, list[str]], list[str]]:
    """Compare tables with the trees of the recorded commits. ``check`` compares files with tables.

    Args:
        ops: which ops of ``repo``; all if none is named.
        repo: the checkout with the ops; also the upstream of the source ``self``.
        checkouts: source -> a git checkout of it. A source without one can't be compared, and is said so.

    Returns:
        op -> what is wrong; and what is worth knowing of what isn't, such as a commit that a rebase of this
        repository has replaced by another with the same files.
    """
    wrong: dict[str, list[str]] = {}
    notes: list[str] = []
    for op in tuple(ops) or known_ops(repo):
        module = module_folder(op, repo)
        table = read_table(module / FOLDER)
        wrong[op] = []
        for name, package in sorted(table.items()):
            where = f"{module / FOLDER / TABLE}: package {name}"
            upstream = {"self": repo, **checkouts}.get(package["source"])
            if upstream is None:
                source = package["source"]
                wrong[op].append(f"{where} comes from {source}; say where that is: --from {source}=CHECKOUT")
                continue
            try:
                wrong[op] += _compare(where, name, package, upstream, notes)
            except VendorError as error:
                wrong[op].append(f"{where}: {error}")
    return wrong, notes


def _compare(
    where: str, name: str, package: Mapping[str, Any], upstream: Path, notes: list[str]
) -> list[str]:
    commit = package["commit"]
    recorded = upstream_files(package)
    if not _git.has_commit(upstream, commit):
        if package["source"] != "self":
            return [f"{where} comes from commit {commit}, which {upstream} doesn't have; fetch it there"]
        for other in _git.history(upstream, package["path"]):
            if _expected(upstream, other, name, package) == recorded:
                notes.append(f"{where}: commit {commit[:12]} is gone, and {other[:12]} has the same files")
                return []
        return [f"{where} comes from commit {commit}, which {upstream} doesn't have, nor one with its files"]
    expected = _expected(upstream, commit, name, package)
    wrong = []
    for file in sorted({*expected, *recorded}):
        if file not in recorded:
            wrong.append(f"{where}: commit {commit[:12]} has {package['path']}/{file}, which isn't recorded")
        elif file not in expected:
            wrong.append(f"{where}: commit {commit[:12]} has no {package['path']}/{file}")
        elif expected[file] != recorded[file]:
            wrong.append(
                f"{where}: {package['path']}/{file} is {expected[file]} in commit {commit[:12]}, "
                f"recorded is {recorded[file]}"
            )
    return wrong


def _expected(upstream: Path, commit: str, name: str, package: Mapping[str, Any]) -> dict[str, str]:
    """The files that a copy from ``commit`` would have from there."""
    options = package.get("options", {})
    inside = "include" if (package["source"], name) == ("self", DEVICE_LIBRARY) else ""
    files = _git.tree(upstream, commit, package["path"], inside)
    want = Wanted(package["path"], tuple(options.get("include", ())), tuple(options.get("exclude", ())))
    if not files or package["source"] == "self":
        return files
    added = set(package.get("added", ()))
    if package["source"] == "miles-pr":
        files = {file: blob for file, blob in files.items() if belongs(file)}
        replaced = options.get("host_shim", {})
        chosen = {
            file: blob
            for file, blob in {**select(files, want, name, commit), REGISTRY: files.get(REGISTRY, "")}.items()
            if not any(fnmatchcase(file, pattern) for pattern in replaced)
        }
    else:
        chosen = select(files, want, name, commit)
        added = set()  # a build.json of ours beside one of theirs would be a difference
    return {file: blob for file, blob in chosen.items() if file not in added}
