"""Small git repositories for tests of vendoring, made from nothing and needing no configuration of git's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Checkout", "write_files"]

_IDENTITY = ("user.name=a", "user.email=a@b", "core.autocrlf=false", "commit.gpgsign=false")


class Checkout:
    """A git repository with a working tree.

    Args:
        root: its folder; made and initialised if need be.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        if not (root / ".git").exists():
            root.mkdir(parents=True, exist_ok=True)
            self.git("init", "-q", "-b", "main")

    def git(self, *words: str, status: int = 0) -> str:
        """What ``git`` prints; a failed assertion where it exits with another status."""
        options = [word for setting in _IDENTITY for word in ("-c", setting)]
        done = subprocess.run(
            ["git", "-C", str(self.root), *options, *words],
            capture_output=True,
            text=True,
            check=False,
            env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")},
        )
        if done.returncode != status:
            raise AssertionError(f"git {words} exited {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def commit(self, files: Mapping[str, str | None] | None = None) -> str:
        """Write files (None deletes one), commit everything, and return the commit."""
        for name, text in (files or {}).items():
            if text is None:
                (self.root / name).unlink()
            else:
                write_files(self.root, {name: text})
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write texts with their line ends as they are, by name relative to ``folder``; returns it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder
