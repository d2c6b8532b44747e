"""What vendoring asks of git: commits, trees and blobs of a checkout, never its working files."""

from __future__ import annotations

import os
import posixpath
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ._table import VendorError, blob_id

__all__ = ["blob", "commit_of", "git", "has_commit", "history", "module_name", "refuse_dirty", "tree"]


def git(repo: Path, *words: str) -> bytes:
    """What ``git`` prints.

    Raises:
        VendorError: there is no git, or it fails; the message has what it says.
    """
    # A hook's environment would point git at another repository than the one that was asked for.
    hooks = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    environment = {k: v for k, v in os.environ.items() if k not in hooks}
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *words], capture_output=True, env=environment, check=False
        )
    except OSError as error:
        raise VendorError(f"git could not be run ({error.strerror})") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise VendorError(f"git {' '.join(words)} failed in {repo}{': ' + said if said else ''}")
    return done.stdout


def commit_of(repo: Path, revision: str | None) -> str:
    """The commit that a revision names, HEAD by default: 40 hex digits.

    Raises:
        VendorError: no such commit.
    """
    wanted = f"{revision or 'HEAD'}^{{commit}}"
    return git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", wanted).decode().strip()


def has_commit(repo: Path, commit: str) -> bool:
    """Whether the repository still has a commit."""
    try:
        git(repo, "cat-file", "-e", f"{commit}^{{commit}}")
    except VendorError:
        return False
    return True


def refuse_dirty(repo: Path, paths: Iterable[str]) -> None:
    """Refuse to copy HEAD where the working files below ``paths`` differ from it.

    Raises:
        VendorError: they do; the message names them.
    """
    status = git(repo, "status", "--porcelain", "--untracked-files=all", "--", *paths)
    dirty = "; ".join(line.strip() for line in status.decode().splitlines())
    if dirty:
        raise VendorError(f"no commit holds these changes: {dirty}; commit them, or say --commit")


def tree(repo: Path, commit: str, path: str, inside: str = "") -> dict[str, str]:
    """The files below ``path/inside``: name relative to ``path`` -> blob id.

    Raises:
        VendorError: a link or submodule is among them.
    """
    files = {}
    where = f"{path}/{inside}" if inside else path
    listing = git(repo, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{where}/").decode()
    for line in filter(None, listing.split("\0")):
        described, name = line.split("\t", 1)
        mode, kind, blob = described.split(" ")
        if kind != "blob" or mode not in ("100644", "100755"):
            raise VendorError(f"{name} is a link or submodule (mode {mode}), which can't be copied")
        files[posixpath.relpath(name, path)] = blob
    return dict(sorted(files.items()))


def blob(repo: Path, wanted: str) -> bytes:
    """The bytes of a blob.

    Raises:
        VendorError: it isn't there, or its bytes have another id.
    """
    data = git(repo, "cat-file", "blob", wanted)
    if blob_id(data) != wanted:
        raise VendorError(f"blob {wanted} of {repo} has other bytes than its id says (a sha256 repository?)")
    return data


def history(repo: Path, path: str) -> list[str]:
    """The commits reachable from HEAD that touched ``path``, newest first."""
    return git(repo, "rev-list", "HEAD", "--", path).decode().split()


def module_name(repo: Path, commit: str, path: str) -> str:
    """The dotted name by which the sources at ``path`` import each other: ``path`` from the first folder
    above it that is a regular package on."""
    parts = path.split("/")
    first = len(parts) - 1
    while first > 0:
        init = f"{'/'.join(parts[:first])}/__init__.py"
        if not git(repo, "ls-tree", "-z", "--full-tree", commit, "--", init):
            break
        first -= 1
    return ".".join(parts[first:])
