"""Builds the sdist and the wheel of one distribution: the same bytes wherever and whenever it is done."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from release_record import Release, ReleaseError, export, export_worktree, git, sources, unpack

__all__ = [
    "HATCHLING",
    "Built",
    "build",
    "build_commit",
    "build_release",
    "build_worktree",
    "builder",
    "metadata",
    "set_version",
]

HATCHLING = "1.33.0"
"""The version that builds releases: it writes its own into every wheel."""
WORKTREE_EPOCH = 1577836800


@dataclass(frozen=True)
class Built:
    """The files of one build."""

    sdist: Path
    wheel: Path

    def hashes(self) -> tuple[str, str]:
        """sha256 of sdist and wheel."""
        first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (self.sdist, self.wheel))
        return first, second


def builder() -> str:
    """The build backend here, as ``releases.toml`` names it.

    Raises:
        ReleaseError: it isn't installed.
    """
    try:
        return f"hatchling {importlib.metadata.version('hatchling')}"
    except importlib.metadata.PackageNotFoundError:
        raise ReleaseError(f"hatchling is not installed: pip install hatchling=={HATCHLING}") from None


def build(source: Path, out: Path, epoch: int) -> Built:
    """An sdist of a folder, and the wheel of that sdist alone, so that both hold the same.

    Bytes depend on the folder's files, ``epoch`` and hatchling's version: not on times, the user, the
    umask, the place or git.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sdist = _hatch(source, "sdist", Path(scratch, "sdist"), epoch)
        with tarfile.open(sdist) as archive:
            unpack(archive, Path(scratch))
        unpacked = Path(scratch, sdist.name.removesuffix(".tar.gz"))
        wheel = _hatch(unpacked, "wheel", Path(scratch, "wheel"), epoch)
        return Built(*(Path(shutil.copy(path, out / path.name)) for path in (sdist, wheel)))


def _hatch(source: Path, target: str, out: Path, epoch: int) -> Path:
    builder()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HATCH_", "PYTHON"))}
    environment.update(SOURCE_DATE_EPOCH=str(epoch), PYTHONHASHSEED="0")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, umask=0o022, check=False
    )
    if done.returncode != 0:
        raise ReleaseError(
            f"hatchling could not build the {target} of {source.name}:\n{done.stdout}{done.stderr}"
        )
    (made,) = (path for path in out.iterdir() if path.suffix in (".gz", ".whl"))
    return made


def build_commit(repo: Path, distribution: str, commit: str, out: Path) -> Built:
    """Build ``packages/<distribution>`` of a commit."""
    epoch = int(git(repo, "show", "-s", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as scratch:
        source = export(repo, f"{commit}:packages/{distribution}", Path(scratch, distribution))
        return build(source, out, epoch)


def build_release(
    repo: Path, distribution: str, version: str, release: Release, out: Path
) -> tuple[Built, str]:
    """Build a recorded release again.

    Returns:
        The files, and where the sources came from (see ``release_record.sources``).

    Raises:
        ReleaseError: the sources can't be had, or the same builder gives other bytes than it did then.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, distribution)
        origin = sources(repo, distribution, version, release, source)
        built = build(source, out, release.epoch)
    if builder() == release.builder and built.hashes() != (release.sdist, release.wheel):
        raise ReleaseError(
            f"{distribution} {version} is not what was released: sdist and wheel built from its {origin} "
            f"have sha256 {', '.join(built.hashes())}, recorded are {release.sdist}, {release.wheel}"
        )
    return built, origin


def build_worktree(repo: Path, distribution: str, out: Path, version: str | None = None) -> Built:
    """Build what lies in the working tree, committed or not; ``version`` takes the place of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        source = export_worktree(repo, f"packages/{distribution}", Path(scratch, distribution))
        if version is not None:
            set_version(source / "pyproject.toml", version)
        return build(source, out, WORKTREE_EPOCH)


def set_version(pyproject: Path, version: str) -> None:
    """Replace the version of a ``pyproject.toml``."""
    lines = pyproject.read_text(encoding="utf-8").splitlines()
    (index,) = (i for i, line in enumerate(lines) if line.startswith("version = "))
    lines[index] = f'version = "{version}"'
    pyproject.write_text("\n".join(lines) + "\n", encoding="utf-8")


def metadata(wheel: Path) -> dict[str, list[str]]:
    """Field -> values of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (file for file in archive.namelist() if file.endswith(".dist-info/METADATA"))
        message = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    return {field: message.get_all(field) or [] for field in message}
