"""What has to agree before a version is released: number, changelog, bounds, frozen kernel copies."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from release_record import Records, ReleaseError, export, git, has_object, packages, tag_of, tomllib

__all__ = ["KINDS", "core_bounds", "fold", "project", "troubles", "version_at"]

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "perf", "numerics")
"""Kinds of changelog fragments, in the order of a section."""
CORE = "cake-core"
_HEADING = re.compile(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?[ \t]*$", re.MULTILINE)
_FRAGMENT = re.compile(rf"[a-z0-9][a-z0-9-]*\.({'|'.join(KINDS)})\.md\Z")


# ---- looking


def project(folder: Path) -> dict[str, Any]:
    """The table ``[project]`` of a folder's ``pyproject.toml``."""
    data = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = data["project"]
    return table


def core_bounds(requirements: list[str]) -> Requirement | None:
    """The requirement of cake-core among a distribution's, extras left aside."""
    for text in requirements:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == CORE and requirement.marker is None:
            return requirement
    return None


def version_at(repo: Path, distribution: str, commit: str) -> str:
    """The version that a distribution has in a commit.

    Raises:
        ReleaseError: the commit has no such distribution.
    """
    if distribution not in packages(repo, commit):
        known = ", ".join(packages(repo, commit))
        raise ReleaseError(f"{commit} has no distribution {distribution!r}; it has: {known}")
    text = git(repo, "show", f"{commit}:packages/{distribution}/pyproject.toml")
    return str(tomllib.loads(text)["project"]["version"])


# ---- what would stop a release


def troubles(repo: Path, distribution: str, commit: str, records: Records) -> list[str]:
    """Everything that keeps this commit's version from being released, one sentence each."""
    version = version_at(repo, distribution, commit)
    with tempfile.TemporaryDirectory() as scratch:
        root = export(repo, commit, Path(scratch, "commit"))
        folder = root / "packages" / distribution
        found = [
            *_of_version(repo, distribution, version, commit, records),
            *_of_changelog(folder, version),
            *_of_bounds(folder, distribution, records),
            *_of_vendored(root, distribution),
        ]
    return [f"{distribution} {version}: {text}" for text in found]


def _of_version(repo: Path, distribution: str, version: str, commit: str, records: Records) -> list[str]:
    try:
        this = Version(version)
    except InvalidVersion:
        return [f"pyproject.toml's version {version!r} is no version"]
    if str(this) != version or this.local is not None or this.is_devrelease:
        return [f"pyproject.toml's version {version!r} is not one that is released; like 0.1.0 or 0.2.0rc1"]
    found = []
    earlier = records.get(distribution, {})
    if version in earlier:
        found.append(f"it is in releases.toml already, from commit {earlier[version].commit[:12]}")
    newer = [v for v in earlier if Version(v) > this and Version(v).release[:2] == this.release[:2]]
    if newer and version not in earlier:
        found.append(f"{max(newer, key=Version)} of the same series is released, which is newer")
    tag = tag_of(distribution, version)
    if has_object(repo, f"refs/tags/{tag}"):
        at = git(repo, "rev-parse", f"refs/tags/{tag}^{{commit}}")
        found.append(f"there is a tag {tag} already, at {at[:12]}")
    return found


def _of_changelog(folder: Path, version: str) -> list[str]:
    found = []
    left = sorted(path.name for path in (folder / "changelog.d").glob("*") if path.name != ".gitkeep")
    if left:
        found.append(f"changelog.d still holds {', '.join(left)}: run `tools/release.py prepare` and commit")
    path = folder / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    headings = list(_HEADING.finditer(text))
    if not headings or headings[0].group(1) != version:
        first = headings[0].group(1) if headings else "no version"
        return [*found, f"CHANGELOG.md begins with {first}, expected a section '## {version} (date)'"]
    if headings[0].group(2) is None:
        found.append(f"CHANGELOG.md's section {version} has no date, like '## {version} (2026-01-31)'")
    end = headings[1].start() if len(headings) > 1 else len(text)
    if not re.search(r"^- \S", text[headings[0].end() : end], re.MULTILINE):
        found.append(f"CHANGELOG.md's section {version} is empty")
    return found


def _of_bounds(folder: Path, distribution: str, records: Records) -> list[str]:
    if distribution == CORE:
        return []
    bounds = core_bounds(list(project(folder).get("dependencies", [])))
    if bounds is None or not bounds.specifier:
        return [f"it does not bound {CORE}, which it needs"]
    if not any(bounds.specifier.contains(v, prereleases=True) for v in records.get(CORE, {})):
        known = ", ".join(records.get(CORE, {})) or "none"
        return [f"no released {CORE} satisfies {bounds}; released: {known}"]
    return []


def _of_vendored(root: Path, distribution: str) -> list[str]:
    """What the commit's own `cake vendor check` says of its frozen kernel copies."""
    if distribution == CORE:
        return []
    command = [sys.executable, "tools/vendor_cake.py", "check", distribution.removeprefix("cake-")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    said = "; ".join(line for line in (done.stdout + done.stderr).splitlines() if line.strip())
    return [f"its frozen kernel copies are not what VENDORED.json says: {said}"]


# ---- folding fragments into the changelog


def fold(folder: Path, version: str, date: datetime.date) -> list[str]:
    """Make a section of ``changelog.d``'s fragments at the head of ``CHANGELOG.md``, and remove them.

    Returns:
        The names of the fragments.

    Raises:
        ReleaseError: there is none, one has no kind or no text, or the version has a section already.
    """
    fragments = sorted(path for path in (folder / "changelog.d").glob("*") if path.name != ".gitkeep")
    if not fragments:
        raise ReleaseError(f"{folder.name}: changelog.d is empty, so there is nothing to release")
    items: dict[str, list[str]] = {}
    for path in fragments:
        match = _FRAGMENT.match(path.name)
        text = path.read_text(encoding="utf-8").strip()
        if match is None or not text:
            raise ReleaseError(
                f"{folder.name}: changelog.d/{path.name} must be text in a file <what>.<kind>.md with a kind "
                f"of {', '.join(KINDS)}"
            )
        items.setdefault(match.group(1), []).append(_item(text))
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    if any(heading.group(1) == version for heading in headings):
        raise ReleaseError(f"{folder.name}: CHANGELOG.md has a section {version} already")
    section = [f"## {version} ({date.isoformat()})"]
    section += [f"### {kind.capitalize()}\n\n" + "\n".join(items[kind]) for kind in KINDS if kind in items]
    at = headings[0].start() if headings else len(text)
    before = text[:at].rstrip()
    after = text[at:].strip()
    parts = [before, "\n\n".join(section), *([after] if after else [])]
    changelog.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    for path in fragments:
        path.unlink()
    return [path.name for path in fragments]


def _item(text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    wrap = {"width": 118, "break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    first, *rest = (
        textwrap.fill(part, initial_indent="- " if i == 0 else "  ", **wrap)
        for i, part in enumerate(paragraphs)
    )
    return "\n\n".join([first, *rest])
