"""The merge driver of ``VENDORED.json``: three-way, package by package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _git
from ._table import TABLE, VendorError, parse_table, table_text

__all__ = ["ATTRIBUTES", "DRIVER", "install_merge", "merge"]

DRIVER = "cake-vendored"
ATTRIBUTES = f"**/_vendor/** -text -merge linguist-vendored\n**/_vendor/{TABLE} text eol=lf merge={DRIVER}\n"
"""What .gitattributes needs: bytes as they are, no file mixed from two sides, this driver."""


def merge(base: Path, ours: Path, theirs: Path, name: str = TABLE) -> list[str]:
    """Merge three versions of a table as git hands them to a driver; the result is written to ``ours``.

    A package that one side alone has changed, added or removed is taken from that side. What both sides
    changed is a conflict, and so are two commits of one source: our side stays there.

    Args:
        base: the common ancestor; empty if there is none.
        ours, theirs: the two sides.
        name: the path in the repository, for messages.

    Returns:
        The conflicts, one sentence each; empty for a clean merge.

    Raises:
        VendorError: a side can't be read; ``ours`` is as it was.
    """
    sides = [
        _read(path, f"{name} ({side})")
        for path, side in ((base, "the common ancestor"), (ours, "our side"), (theirs, "their side"))
    ]
    merged, conflicts = _merge_tables(*sides)
    ours.write_text(table_text(merged), encoding="utf-8", newline="\n")
    return [f"{name}: {conflict}" for conflict in conflicts]


def _read(path: Path, where: str) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    return parse_table(text, where) if text.strip() else {}


def _merge_tables(
    base: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    merged: dict[str, Any] = {}
    conflicts = []
    for name in sorted({*base, *ours, *theirs}):
        before, mine, other = (side.get(name) for side in (base, ours, theirs))
        if mine == other or other == before:
            chosen = mine
        elif mine == before:
            chosen = other
        else:
            chosen = mine
            conflicts.append(
                f"both sides changed package {name!r}: ours {_say(mine)}, theirs {_say(other)}; ours was "
                "kept, so vendor the one that you want again"
            )
        if chosen is not None:
            merged[name] = chosen
    for source in sorted({package["source"] for package in merged.values()}):
        commits = {p["commit"]: name for name, p in merged.items() if p["source"] == source}
        if len(commits) > 1:
            said = ", ".join(f"{name!r} from {commit[:12]}" for commit, name in sorted(commits.items()))
            conflicts.append(
                f"source {source!r} would come from {len(commits)} commits ({said}); vendor them again "
                "from one"
            )
    return merged, conflicts


def _say(package: Mapping[str, Any] | None) -> str:
    return "removed it" if package is None else f"has it from {package['source']} at {package['commit'][:12]}"


def install_merge(repo: Path) -> list[str]:
    """Tell git in ``repo`` how to merge tables, and .gitattributes that it shall.

    Returns:
        What was done, one sentence each.

    Raises:
        VendorError: not a git checkout.
    """
    tool = "tools/vendor_cake.py"
    command = f"python3 {tool}" if (repo / tool).is_file() else "cake vendor"
    _git.git(repo, "config", f"merge.{DRIVER}.name", "VENDORED.json, package by package")
    _git.git(repo, "config", f"merge.{DRIVER}.driver", f"{command} merge %O %A %B %P")
    done = [f"git merges {TABLE} by `{command} merge`"]
    asked = _git.git(repo, "check-attr", "merge", "--", f"packages/x/_vendor/{TABLE}").decode()
    if not asked.strip().endswith(f": {DRIVER}"):
        path = repo / ".gitattributes"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        joint = "" if not text or text.endswith("\n") else "\n"
        path.write_text(text + joint + ATTRIBUTES, encoding="utf-8", newline="\n")
        done.append(f"{path} names it; commit that file")
    return done


def driver(base: Path, ours: Path, theirs: Path, name: str) -> list[str]:
    """``merge`` for the command line: what goes wrong is a conflict too, so git never takes it for merged."""
    try:
        return merge(base, ours, theirs, name)
    except (VendorError, OSError) as error:
        return [str(error)]
