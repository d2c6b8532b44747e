"""``releases.toml``: what was released and from which sources; and how to get at those sources again.

All that a distribution's files are built from is the folder ``packages/<distribution>`` of one commit. Its
git tree id names these bytes whatever commit they are in, so a squash or a rebase of the main branch takes
nothing away as long as any commit or tag holds them. Where none does (a shallow clone, or tags that got lost)
the sdist under ``releases/`` serves, checked by its sha256.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Release",
    "ReleaseError",
    "export",
    "export_worktree",
    "git",
    "has_object",
    "packages",
    "read",
    "sdist_path",
    "sources",
    "tag_of",
    "unpack",
    "write",
]

FILE = "releases.toml"
KEPT = "releases"
SCHEMA = 1
HEADER = """\
# Every released version and what it was built from, written by tools/release.py; see RELEASING.md.
#
#   commit        what was released; the tag <distribution>-v<version> keeps it alive
#   tree          git's id of packages/<distribution> there: all that the files are built from
#   epoch         SOURCE_DATE_EPOCH of the build, the commit's time
#   builder       what built them; another version may give other bytes
#   sdist, wheel  sha256 of the files; the sdist lies in releases/

schema = 1

[releases]
"""
_HEX = re.compile(r"[0-9a-f]+\Z")
_LENGTHS = {"commit": 40, "tree": 40, "sdist": 64, "wheel": 64}


class ReleaseError(Exception):
    """A release that can't be made, or one whose record or sources don't hold up."""


@dataclass(frozen=True)
class Release:
    """One released version; the fields are those of ``releases.toml``."""

    commit: str
    tree: str
    epoch: int
    builder: str
    sdist: str
    wheel: str


Records = dict[str, dict[str, Release]]


# ---- the table


def read(repo: Path) -> Records:
    """distribution -> version -> release, in the file's order; empty where there is no file.

    Raises:
        ReleaseError: it isn't TOML, or a field is wrong.
    """
    path = repo / FILE
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ReleaseError(f"{FILE} is not TOML: {error}") from error
    if data.get("schema") != SCHEMA or not isinstance(data.get("releases"), dict):
        raise ReleaseError(f"{FILE} must have schema = {SCHEMA} and a table [releases]")
    records: Records = {}
    for name, versions in data["releases"].items():
        for version, fields in versions.items():
            records.setdefault(name, {})[version] = _release(f"{name} {version}", fields)
    return records


def _release(what: str, fields: dict[str, object]) -> Release:
    names = list(Release.__dataclass_fields__)
    if not isinstance(fields, dict) or sorted(fields) != sorted(names):
        raise ReleaseError(f"{FILE}: {what} must have exactly the fields {', '.join(names)}")
    for name, length in _LENGTHS.items():
        value = fields[name]
        if not isinstance(value, str) or len(value) != length or not _HEX.match(value):
            raise ReleaseError(f"{FILE}: {what}: {name} must be {length} hex digits, got {value!r}")
    epoch, builder = fields["epoch"], fields["builder"]
    if not isinstance(epoch, int) or not isinstance(builder, str):
        raise ReleaseError(f"{FILE}: {what}: epoch must be a number and builder a text")
    hexes = {name: str(fields[name]) for name in _LENGTHS}
    return Release(**hexes, epoch=epoch, builder=builder)


def write(repo: Path, records: Records) -> None:
    """Write the table; equal records give equal bytes."""
    parts = [HEADER]
    for name in sorted(records):
        for version, release in records[name].items():
            lines = [f'[releases.{name}."{version}"]']
            for field, value in asdict(release).items():
                lines.append(f"{field} = {value}" if isinstance(value, int) else f'{field} = "{value}"')
            parts.append("\n".join(lines) + "\n")
    (repo / FILE).write_text("\n".join(parts), encoding="utf-8")


def tag_of(distribution: str, version: str) -> str:
    return f"{distribution}-v{version}"


def sdist_path(repo: Path, distribution: str, version: str) -> Path:
    """Where the release's sdist is kept."""
    return repo / KEPT / f"{distribution.replace('-', '_')}-{version}.tar.gz"


# ---- git


def git(repo: Path, *words: str) -> str:
    """What git prints.

    Raises:
        ReleaseError: it failed; the message is git's.
    """
    return _git(repo, *words).decode().strip()


def _git(repo: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"git {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def has_object(repo: Path, name: str) -> bool:
    """Whether this clone holds a git object, as in ``<tree>^{tree}``."""
    command = ["git", "-C", str(repo), "cat-file", "-e", name]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def packages(repo: Path, commit: str | None = None) -> tuple[str, ...]:
    """The distributions of a commit, or of the working tree: cake-core first, then the ops by name."""
    if commit is None:
        found = {path.parent.name for path in repo.glob("packages/*/pyproject.toml")}
    else:
        found = set(git(repo, "ls-tree", "--name-only", f"{commit}:packages").splitlines())
    return tuple(sorted(found, key=lambda name: (name != "cake-core", name)))


def export(repo: Path, treeish: str, into: Path, *paths: str) -> Path:
    """The files of a commit or tree, with the bytes that git holds; nothing of the working tree."""
    data = _git(repo, "-c", "core.autocrlf=false", "archive", "--format=tar", treeish, "--", *paths)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        unpack(archive, into)
    return into


def export_worktree(repo: Path, path: str, into: Path) -> Path:
    """Copy what git knows or would add below ``path``, as it lies in the working tree."""
    listed = _git(repo, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", path)
    for name in sorted({name for name in listed.decode().split("\0") if name}):
        source = repo / name
        if source.is_file():
            target = into / source.relative_to(repo / path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return into


def unpack(archive: tarfile.TarFile, into: Path) -> None:
    """Extract everything below a folder, and nothing elsewhere."""
    into.mkdir(parents=True, exist_ok=True)
    if hasattr(tarfile, "data_filter"):
        archive.extractall(into, filter="data")
    else:  # the first releases of Python 3.10 and 3.11
        archive.extractall(into)


# ---- sources of a release


def sources(repo: Path, distribution: str, version: str, release: Release, into: Path) -> str:
    """Put the release's sources into a folder.

    Returns:
        Where they came from: "commit", "tree" (that commit is gone, another holds the same folder), "sdist".

    Raises:
        ReleaseError: nothing here holds them; the message says what to fetch.
    """
    if has_object(repo, f"{release.tree}^{{tree}}"):
        export(repo, release.tree, into)
        whole = f"{release.commit}:packages/{distribution}"
        here = has_object(repo, whole) and git(repo, "rev-parse", whole) == release.tree
        return "commit" if here else "tree"
    kept = sdist_path(repo, distribution, version)
    tag = tag_of(distribution, version)
    if not kept.is_file():
        raise ReleaseError(
            f"{distribution} {version}: this clone holds neither commit {release.commit[:12]} nor tree "
            f"{release.tree[:12]}, and {kept.relative_to(repo)} is missing; try `git fetch origin tag {tag}`"
        )
    data = kept.read_bytes()
    if hashlib.sha256(data).hexdigest() != release.sdist:
        raise ReleaseError(f"{kept.relative_to(repo)} is not the sdist that {FILE} records (sha256)")
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch, tarfile.open(kept) as archive:
        unpack(archive, Path(scratch))
        shutil.copytree(Path(scratch, kept.name.removesuffix(".tar.gz")), into, dirs_exist_ok=True)
    return "sdist"
