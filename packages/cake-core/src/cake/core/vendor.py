"""Frozen copies of kernel sources inside an op: made from a git commit, checked by the ids of their bytes.

An op may not run CUDA that another distribution ships, so what ops share lives in the repository's
``kernels/`` and each op carries a copy::

    src/cake/<op>/_vendor/
        VENDORED.json            package -> source, commit, path, and the git blob id of every file
        NOTICE                   says not to edit here
        cake/include/cake/*.cuh  the package "cake": kernels/include
        <name>/*                 further packages: kernels/<name>

A blob id is the sha1 that git gives a file's bytes. It outlives a squash or a rebase, and checking it needs
no history and no git; the commit says where to look for the reasons.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core.errors import BuildError, CakeError

__all__ = [
    "DEVICE_LIBRARY",
    "Copied",
    "VendorError",
    "blob_id",
    "check",
    "module_folder",
    "repository",
    "vendor_self",
]

SCHEMA = 1
FOLDER = "_vendor"
TABLE = "VENDORED.json"
NOTICE = "NOTICE"
NOTICE_TEXT = (
    "Frozen copies, made by `cake vendor` and listed in VENDORED.json. Change the source, not these.\n"
)
DEVICE_LIBRARY = "cake"
"""The package that holds ``kernels/include``; every op with kernels carries it."""

_PACKAGE = re.compile(r"[a-z][a-z0-9_]*\Z")
_HEX = re.compile(r"[0-9a-f]{40}\Z")
_FIELDS = {"source", "commit", "path", "files"}


class VendorError(CakeError, RuntimeError):
    """A copy that can't be made, or a table of copies that can't be read."""


@dataclass(frozen=True)
class Copied:
    """What ``vendor_self`` did: the folder, the commit, the packages, and whether anything changed."""

    folder: Path
    commit: str
    packages: tuple[str, ...]
    changed: bool


def blob_id(data: bytes) -> str:
    """The id that git gives a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# ---- where things are


def repository(start: Path | None = None) -> Path | None:
    """The checkout around ``start`` (the working directory by default): the folder with kernels/ and
    packages/."""
    here = (start or Path.cwd()).absolute()
    for folder in (here, *here.parents):
        if (folder / "kernels").is_dir() and (folder / "packages").is_dir():
            return folder
    return None


def module_folder(op: str, repo: Path | None = None) -> Path:
    """The folder of an op's module: in the checkout if there is one, else where it is installed.

    Raises:
        VendorError: the checkout has no such op.
        UnknownOpError: no checkout, and no such op is installed.
    """
    if repo is not None:
        found = repo / "packages" / f"cake-{op}" / "src" / "cake" / op
        if not found.is_dir():
            known = ", ".join(_ops_of(repo)) or "none"
            raise VendorError(
                f"{repo} has no op {op!r} (no folder {found.relative_to(repo)}); it has: {known}"
            )
        return found
    from cake.core import registry

    packages = registry.op_spec(op).kernel_packages
    if not packages:
        raise VendorError(f"op {op!r} declares no kernel package, so it has no folder to look in")
    package = packages[0]
    return Path(os.path.normpath(package.root() / Path(*[".."] * len(Path(package.path).parts))))


def _ops_of(repo: Path) -> list[str]:
    found = (path.name[5:] for path in (repo / "packages").glob("cake-*") if path.name != "cake-core")
    return sorted(op for op in found if (repo / "packages" / f"cake-{op}" / "src" / "cake" / op).is_dir())


def known_ops(repo: Path | None) -> list[str]:
    """The ops of a checkout, or those that are installed and have kernels."""
    if repo is not None:
        return _ops_of(repo)
    from cake.core import registry

    return [spec.name for spec in registry.ops() if spec.kernel_packages]


# ---- the table


def read_table(folder: Path) -> dict[str, Any]:
    """The packages of ``VENDORED.json``; empty where there is none.

    Raises:
        VendorError: it isn't JSON, or a field is wrong.
    """
    path = folder / TABLE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise VendorError(f"{path} can't be read: {error}") from error
    if (
        not isinstance(data, dict)
        or data.get("schema") != SCHEMA
        or not isinstance(data.get("packages"), dict)
    ):
        raise VendorError(f"{path} must be an object with schema {SCHEMA} and packages")
    for name, package in data["packages"].items():
        wrong = _wrong_package(name, package)
        if wrong:
            raise VendorError(f"{path}: package {name!r} {wrong}")
    return dict(data["packages"])


def _wrong_package(name: str, package: Any) -> str:
    if not _PACKAGE.match(name):
        return "must be a lower-case identifier"
    if not isinstance(package, dict) or set(package) != _FIELDS:
        return f"must have the fields {', '.join(sorted(_FIELDS))}"
    if not isinstance(package["source"], str) or not isinstance(package["path"], str):
        return "must have texts for source and path"
    if not isinstance(package["commit"], str) or not _HEX.match(package["commit"]):
        return f"must name a commit by 40 hex digits, got {package['commit']!r}"
    files = package["files"]
    if not isinstance(files, dict) or not files:
        return "must list at least one file"
    for file, blob in files.items():
        if posixpath.isabs(file) or posixpath.normpath(file) != file or file.startswith("../"):
            return f"lists {file!r}, which is no plain path"
        if not isinstance(blob, str) or not _HEX.match(blob):
            return f"must give {file} a blob id of 40 hex digits, got {blob!r}"
    return ""


# ---- copying


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
    old = read_table(module / FOLDER)
    mine = {name for name, package in old.items() if package["source"] == "self"}
    for name in packages:
        if not _PACKAGE.match(name):
            raise VendorError(f"a package must be a lower-case identifier, got {name!r}")
        if name in old and name not in mine:
            raise VendorError(f"package {name!r} of {op} comes from {old[name]['source']!r}; remove it first")
    wanted = sorted({DEVICE_LIBRARY, *packages, *mine})
    if commit is None:
        sources = [f"kernels/{'include' if name == DEVICE_LIBRARY else name}" for name in wanted]
        status = _git(repo, "status", "--porcelain", "--untracked-files=all", "--", *sources)
        dirty = "; ".join(line.strip() for line in status.decode().splitlines())
        if dirty:
            raise VendorError(f"no commit holds these changes: {dirty}; commit them, or say --commit")
    revision = f"{commit or 'HEAD'}^{{commit}}"
    exact = _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", revision).decode().strip()
    table, contents = dict(old), {}
    for name in wanted:
        path = "kernels" if name == DEVICE_LIBRARY else f"kernels/{name}"
        files = _tree(repo, exact, path, "include" if name == DEVICE_LIBRARY else "")
        if not files:
            raise VendorError(
                f"commit {exact[:12]} has no files in {path}{'/include' if name == DEVICE_LIBRARY else ''}"
            )
        table[name] = {"source": "self", "commit": exact, "path": path, "files": files}
        contents.update({f"{name}/{file}": _blob(repo, blob) for file, blob in files.items()})
    same = all(name in old and table[name]["files"] == old[name]["files"] for name in wanted)
    if commit is None and same and not check_folder(module / FOLDER):
        # Nothing is new since: the commit on record stays, so that copying twice changes nothing.
        return Copied(module / FOLDER, old[DEVICE_LIBRARY]["commit"], tuple(wanted), False)
    _replace(module / FOLDER, table, contents)
    return Copied(module / FOLDER, exact, tuple(wanted), table != old)


def _tree(repo: Path, commit: str, path: str, inside: str) -> dict[str, str]:
    """name relative to ``path`` -> blob id, of the files below ``path/inside``."""
    files = {}
    where = f"{path}/{inside}" if inside else path
    for line in (
        _git(repo, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{where}/").decode().split("\0")
    ):
        if not line:
            continue
        described, name = line.split("\t", 1)
        mode, kind, blob = described.split(" ")
        if kind != "blob" or mode not in ("100644", "100755"):
            raise VendorError(f"{name} is a link or submodule (mode {mode}), which can't be copied")
        files[posixpath.relpath(name, path)] = blob
    return dict(sorted(files.items()))


def _blob(repo: Path, blob: str) -> bytes:
    data = _git(repo, "cat-file", "blob", blob)
    if blob_id(data) != blob:
        raise VendorError(f"blob {blob} of {repo} has other bytes than its id says (a sha256 repository?)")
    return data


def _git(repo: Path, *words: str) -> bytes:
    # A hook's environment would point git at another repository than the one that was asked for.
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
    }
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


def _replace(folder: Path, table: Mapping[str, Any], contents: Mapping[str, bytes]) -> None:
    """Make the new ``_vendor`` beside the old one, then swap them."""
    new = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-new-", dir=folder.parent))
    try:
        new.chmod(0o755)
        fresh = {name.split("/", 1)[0] for name in contents}
        for name in set(table) - fresh:  # packages of other sources stay as they are
            if (folder / name).is_dir():
                shutil.copytree(
                    folder / name, new / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
        for name, data in contents.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        (new / NOTICE).write_text(NOTICE_TEXT, encoding="utf-8")
        text = json.dumps({"schema": SCHEMA, "packages": dict(sorted(table.items()))}, indent=2)
        (new / TABLE).write_text(text + "\n", encoding="utf-8")
        old = new.with_name(new.name.replace("-new-", "-old-"))
        existed = folder.exists()
        if existed:
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if existed:
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise VendorError(
            f"{folder} could not be replaced ({error.strerror or error}); it is as it was"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


# ---- checking


def check(ops: Iterable[str] = (), repo: Path | None = None) -> dict[str, list[str]]:
    """Compare the copies of ops with their tables. Needs no git.

    Args:
        ops: which; all of the checkout, or all installed ones, if none is named.
        repo: a checkout to look in; None looks at what is installed.

    Returns:
        op -> what is wrong, one sentence per file; empty lists where all is well.
    """
    return {op: check_folder(module_folder(op, repo) / FOLDER) for op in (tuple(ops) or known_ops(repo))}


def check_folder(folder: Path) -> list[str]:
    """What is wrong in one ``_vendor``: exact file set, blob ids, notice, one commit per source, each
    build.json."""
    if not folder.exists():
        return []
    try:
        table = read_table(folder)
    except VendorError as error:
        return [str(error)]
    if not table:
        return [f"{folder / TABLE} is missing or lists nothing"]
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
    for source in sorted({package["source"] for package in table.values()}):
        commits = sorted({package["commit"] for package in table.values() if package["source"] == source})
        if len(commits) > 1:
            wrong.append(
                f"{folder / TABLE}: source {source!r} comes from {len(commits)} commits: {', '.join(commits)}"
            )
    return wrong + _wrong_builds(folder, present)


def _wrong_builds(folder: Path, present: Iterable[str]) -> list[str]:
    from cake.core import build

    wrong = []
    for name in sorted(present):
        if posixpath.basename(name) == "build.json":
            try:
                package = build.read_package((folder / name).parent)
                for record in package.records:
                    build.source_files(package, record)
            except BuildError as error:
                wrong.append(str(error).replace("\n", "; "))
    return wrong
