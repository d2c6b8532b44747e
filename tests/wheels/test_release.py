"""tools/release.py on throw-away repositories: what it makes, what it refuses, what survives a squash."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "cake-toy"
version = "0.1.0"
dependencies = ["cake-core>=0.1,<0.2"]

[tool.hatch.build.targets.wheel]
packages = ["src/cake"]

[tool.hatch.build.targets.sdist]
include = ["/src", "/tests", "/CHANGELOG.md"]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _git_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(repo: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(repo: Path, message: str) -> str:
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", message)
    return git(repo, "rev-parse", "HEAD")


def release(repo: Path, *words: str, ok: bool = True) -> str:
    """Run the tool; its output. With ``ok`` false it has to fail."""
    command = [sys.executable, str(ROOT / "tools/release.py"), "--repo", str(repo), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with this cake-core and a small op with a frozen copy, both about to be 0.1.0."""
    repo = tmp_path / "repo"
    core = repo / "packages/cake-core"
    here = ROOT / "packages/cake-core"
    shutil.copytree(here / "src", core / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(here / name, core / name)
    text = (core / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    version = [i for i, line in enumerate(text) if line.startswith("version = ")]
    text[version[0]] = 'version = "0.1.0"'
    write(core / "pyproject.toml", "\n".join(text) + "\n")
    write(core / "tests/test_nothing.py", "")
    toy = repo / "packages/cake-toy"
    write(toy / "pyproject.toml", PYPROJECT)
    write(toy / "src/cake/toy/__init__.py", "NUMBER = 1\n")
    write(toy / "tests/test_toy.py", "import cake.toy\n")
    for name in ("cake-core", "cake-toy"):
        write(repo / "packages" / name / "CHANGELOG.md", f"# Changelog of {name}\n\nAs it goes.\n")
        write(repo / "packages" / name / "changelog.d/start.added.md", "The first\nrelease.\n")
    write(repo / "kernels/include/cake/a.cuh", "// a\n")
    write(repo / "tools/vendor_cake.py", (ROOT / "tools/vendor_cake.py").read_text(encoding="utf-8"))
    write(repo / ".gitattributes", "**/_vendor/** -text\n")
    write(repo / ".gitignore", "__pycache__/\n")
    git(tmp_path, "init", "-q", "-b", "main", str(repo))
    commit(repo, "start")
    done = subprocess.run(
        [sys.executable, "tools/vendor_cake.py", "self", "toy"],
        cwd=repo,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    commit(repo, "vendor")
    return repo


@pytest.fixture
def ready(repo: Path) -> Path:
    """The same, prepared and committed."""
    for name in ("cake-core", "cake-toy"):
        release(repo, "prepare", name, "0.1.0", "--date", "2026-01-31")
    commit(repo, "prepare")
    return repo


@pytest.fixture
def released(ready: Path) -> Path:
    release(ready, "cut", "cake-core", "cake-toy")
    return ready


@pytest.fixture
def record() -> Iterator[object]:
    """The module that reads releases.toml."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import release_record

        yield release_record
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_repositorys_own_table_is_sound(record) -> None:
    records = record.read(ROOT)
    text = (ROOT / "releases.toml").read_text(encoding="utf-8")
    copy = {name: dict(versions) for name, versions in records.items()}
    for name, versions in copy.items():
        assert (ROOT / "packages" / name).is_dir()
        for version in versions:
            assert record.sdist_path(ROOT, name, version).is_file()
    kept = {path.name for path in (ROOT / "releases").glob("*.tar.gz")}
    assert kept == {record.sdist_path(ROOT, n, v).name for n, vs in records.items() for v in vs}
    assert text.startswith(record.HEADER)


def test_prepare_folds_fragments(repo: Path) -> None:
    toy = repo / "packages/cake-toy"
    write(toy / "changelog.d/bits.numerics.md", "Other bits.\n\nFor everybody.\n")
    write(toy / "changelog.d/also.added.md", "Also.\n")
    release(repo, "prepare", "cake-toy", "0.2.0", "--date", "2026-01-31")
    text = (toy / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text == (
        "# Changelog of cake-toy\n\nAs it goes.\n\n"
        "## 0.2.0 (2026-01-31)\n\n### Added\n\n- Also.\n- The first release.\n\n"
        "### Numerics\n\n- Other bits.\n\n  For everybody.\n"
    )
    assert 'version = "0.2.0"' in (toy / "pyproject.toml").read_text(encoding="utf-8")
    assert not list((toy / "changelog.d").iterdir())
    assert "nothing to release" in release(repo, "prepare", "cake-toy", "0.3.0", ok=False)
    write(toy / "changelog.d/later.fixed.md", "Later.\n")
    assert "has a section 0.2.0 already" in release(repo, "prepare", "cake-toy", "0.2.0", ok=False)
    release(repo, "prepare", "cake-toy", "0.3.0", "--date", "2026-02-01")
    newer = (toy / "CHANGELOG.md").read_text(encoding="utf-8")
    assert newer.index("## 0.3.0 (2026-02-01)") < newer.index("## 0.2.0 (2026-01-31)")


@pytest.mark.parametrize("name", ["oops.md", "oops.better.md", "Up.fixed.md"])
def test_a_fragment_without_a_kind_is_refused(repo: Path, name: str) -> None:
    write(repo / "packages/cake-toy/changelog.d" / name, "Text.\n")
    assert f"changelog.d/{name} must be" in release(repo, "prepare", "cake-toy", "0.2.0", ok=False)
    assert (repo / "packages/cake-toy/changelog.d/start.added.md").exists()


def test_cut_tags_records_and_keeps(released: Path, record) -> None:
    assert git(released, "status", "--porcelain") == ""
    records = record.read(released)
    assert {name: list(versions) for name, versions in records.items()} == {
        "cake-core": ["0.1.0"],
        "cake-toy": ["0.1.0"],
    }
    prepared = git(released, "rev-parse", "HEAD~2")
    for name, versions in records.items():
        one = versions["0.1.0"]
        assert one.commit == prepared == git(released, "rev-parse", f"{name}-v0.1.0^{{commit}}")
        assert git(released, "cat-file", "-t", f"{name}-v0.1.0") == "tag"
        assert one.tree == git(released, "rev-parse", f"{prepared}:packages/{name}")
    assert (released / "releases/cake_toy-0.1.0.tar.gz").is_file()
    assert release(released, "list").count("missing") == 0
    assert release(released, "verify").count("same bytes") == 2


def test_the_files_are_the_same_bytes_anywhere(released: Path, tmp_path: Path, record) -> None:
    """Another folder, umask, time zone and user's home; a clone in place of the repository."""
    clone = tmp_path / "far away" / "clone"
    git(tmp_path, "clone", "-q", str(released), str(clone))
    before = os.umask(0o077)
    try:
        words = ["build", "cake-toy", "0.1.0", "-o", str(tmp_path / "dist")]
        assert "from its commit" in release(clone, *words)
    finally:
        os.umask(before)
    one = record.read(released)["cake-toy"]["0.1.0"]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    assert sdist.read_bytes() == (released / "releases" / sdist.name).read_bytes()
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == one.wheel
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "cake/toy/_vendor/VENDORED.json" in names
        assert "cake/__init__.py" not in names
        times = {info.date_time[0] for info in archive.infolist()}
    assert times == {int(git(released, "show", "-s", "--format=%cd", "--date=format:%Y", one.commit))}
    with tarfile.open(sdist) as archive:
        assert "cake_toy-0.1.0/tests/test_toy.py" in archive.getnames()


def test_dirt_in_the_working_tree_does_not_reach_a_release(ready: Path) -> None:
    write(ready / "packages/cake-toy/src/cake/toy/__init__.py", "NUMBER = 2\n")
    release(ready, "cut", "cake-core")
    assert "not committed" in release(ready, "cut", "cake-toy", ok=False)
    head = git(ready, "rev-parse", "HEAD")
    release(ready, "cut", "cake-toy", "--commit", head)
    with tarfile.open(ready / "releases/cake_toy-0.1.0.tar.gz") as archive:
        file = archive.extractfile("cake_toy-0.1.0/src/cake/toy/__init__.py")
        assert file is not None
        assert file.read() == b"NUMBER = 1\n"


def refused(repo: Path, *words: str) -> str:
    """What the tool says when it refuses; nothing was tagged or recorded."""
    tags, status = git(repo, "tag"), git(repo, "status", "--porcelain")
    text = release(repo, "cut", *words, ok=False)
    assert git(repo, "tag") == tags
    assert git(repo, "status", "--porcelain") == status
    return text


def test_a_changelog_that_is_not_ready_is_refused(repo: Path) -> None:
    core = repo / "packages/cake-core"
    text = refused(repo, "cake-core")
    assert "changelog.d still holds start.added.md" in text
    assert "CHANGELOG.md begins with no version, expected a section '## 0.1.0 (date)'" in text
    assert "start.added.md" in release(repo, "check", "cake-core", ok=False)
    (core / "changelog.d/start.added.md").unlink()
    for section, why in (
        ("## 0.0.9 (2026-01-31)\n\n- Old.\n", "begins with 0.0.9"),
        ("## 0.1.0 (2026-01-31)\n\n## 0.0.9 (2026-01-30)\n\n- Old.\n", "section 0.1.0 is empty"),
        ("## 0.1.0\n\n- New.\n", "section 0.1.0 has no date"),
    ):
        write(core / "CHANGELOG.md", f"# Changelog\n\n{section}")
        commit(repo, "changelog")
        assert why in refused(repo, "cake-core")
    write(core / "CHANGELOG.md", "# Changelog\n\n## 0.1.0 (2026-01-31)\n\n- New.\n")
    commit(repo, "changelog")
    assert "can be released" in release(repo, "check", "cake-core")


@pytest.mark.parametrize("version", ["0.1.0.dev1", "0.1.0+local", "0.1.00", "next"])
def test_a_version_that_is_none_is_refused(ready: Path, version: str) -> None:
    path = ready / "packages/cake-core/pyproject.toml"
    write(path, path.read_text(encoding="utf-8").replace('version = "0.1.0"', f'version = "{version}"'))
    commit(ready, "version")
    assert f"version '{version}'" in refused(ready, "cake-core")


def test_what_is_released_stays(released: Path) -> None:
    text = refused(released, "cake-core")
    assert "it is in releases.toml already" in text
    assert "there is a tag cake-core-v0.1.0 already" in text
    toy = released / "packages/cake-toy"
    write(toy / "changelog.d/more.added.md", "More.\n")
    release(released, "prepare", "cake-toy", "0.0.9")
    commit(released, "an older number of another series")
    assert "newer" not in release(released, "check", "cake-toy")
    write(toy / "changelog.d/more.added.md", "More.\n")
    release(released, "prepare", "cake-toy", "0.1.0rc1")
    commit(released, "an older number of the same series")
    assert "0.1.0 of the same series is released, which is newer" in refused(released, "cake-toy")


def test_an_op_without_a_core_is_refused(ready: Path) -> None:
    assert "no released cake-core satisfies cake-core<0.2,>=0.1; released: none" in refused(ready, "cake-toy")
    path = ready / "packages/cake-toy/pyproject.toml"
    write(path, path.read_text(encoding="utf-8").replace('"cake-core>=0.1,<0.2"', ""))
    commit(ready, "unbound")
    assert "it does not bound cake-core" in refused(ready, "cake-toy")


@pytest.mark.parametrize("how", ["doctored", "missing", "extra"])
def test_a_frozen_copy_that_differs_is_refused(ready: Path, how: str) -> None:
    release(ready, "cut", "cake-core")
    (header,) = (ready / "packages/cake-toy/src").rglob("a.cuh")
    if how == "doctored":
        header.write_text("// b\n")
    elif how == "missing":
        header.unlink()
    else:
        header.with_name("more.cuh").write_text("// more\n")
    commit(ready, how)
    text = refused(ready, "cake-toy")
    assert "its frozen kernel copies are not what VENDORED.json says" in text
    assert ("more.cuh" if how == "extra" else "a.cuh") in text


def test_an_unknown_distribution_or_commit_is_refused(ready: Path) -> None:
    assert "has no distribution 'cake-pie'; it has: cake-core, cake-toy" in refused(ready, "cake-pie")
    assert "no-such-rev" in refused(ready, "cake-core", "--commit", "no-such-rev")


def squash(repo: Path) -> None:
    """Make one commit of the main branch's whole history, as a squash does."""
    tree = git(repo, "rev-parse", "HEAD^{tree}")
    new = git(repo, "commit-tree", tree, "-m", "everything")
    git(repo, "update-ref", "refs/heads/main", new)


def change(repo: Path) -> None:
    write(repo / "packages/cake-toy/src/cake/toy/__init__.py", "NUMBER = 3\n")
    commit(repo, "later work")


def test_a_squash_that_keeps_the_tags_changes_nothing(released: Path, tmp_path: Path) -> None:
    change(released)
    squash(released)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", f"file://{released}", str(clone))
    text = release(clone, "verify")
    assert text.count("from its commit: same bytes") == 2


def test_a_squash_that_loses_the_tags_still_has_the_trees_or_the_sdists(
    released: Path, tmp_path: Path
) -> None:
    """cake-core is as it was released, so the squashed commit holds its tree; cake-toy went on."""
    change(released)
    squash(released)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--no-tags", "--single-branch", f"file://{released}", str(clone))
    text = release(clone, "verify")
    assert "cake-core 0.1.0 from its tree: same bytes" in text
    assert "cake-toy 0.1.0 from its sdist: same bytes" in text
    (clone / "releases/cake_toy-0.1.0.tar.gz").unlink()
    assert "try `git fetch origin tag cake-toy-v0.1.0`" in release(clone, "verify", ok=False)
    git(clone, "fetch", "-q", "origin", "tag", "cake-toy-v0.1.0")
    assert "cake-toy 0.1.0 from its commit: same bytes" in release(clone, "verify")


def test_other_bytes_are_noticed(released: Path, tmp_path: Path) -> None:
    table = released / "releases.toml"
    text = table.read_text(encoding="utf-8")
    (line,) = [x for x in text.split("cake-toy")[-1].splitlines() if x.startswith("wheel = ")]
    write(table, text.replace(line, f'wheel = "{"0" * 64}"'))
    assert "cake-toy 0.1.0 is not what was released" in release(released, "verify", ok=False)
    change(released)
    squash(released)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--no-tags", "--single-branch", f"file://{released}", str(clone))
    sdist = clone / "releases/cake_toy-0.1.0.tar.gz"
    sdist.write_bytes(sdist.read_bytes() + b"\0")
    assert "is not the sdist that releases.toml records" in release(clone, "verify", ok=False)


@pytest.mark.parametrize(
    "text",
    [
        "releases = 3\n",
        "schema = 2\n[releases]\n",
        "schema = 1\n[releases",
        'schema = 1\n[releases.cake-toy."0.1.0"]\ncommit = "abc"\n',
    ],
)
def test_a_broken_table_is_refused(ready: Path, text: str) -> None:
    write(ready / "releases.toml", text)
    assert "release: releases.toml" in release(ready, "list", ok=False)


def test_a_release_branch_is_cut_without_touching_main(ready: Path, tmp_path: Path) -> None:
    """The commit may be on no branch that stays: the tag holds it."""
    change(ready)
    side = tmp_path / "side"
    git(ready, "worktree", "add", "-q", "--detach", str(side), "HEAD~1")
    write(side / "packages/cake-core/README.md", "patched\n")
    patched = commit(side, "patch")
    release(ready, "cut", "cake-core", "--commit", patched)
    git(ready, "worktree", "remove", str(side))
    assert git(ready, "merge-base", "HEAD", patched) != patched
    assert "cake-core 0.1.0 from its commit: same bytes" in release(ready, "verify")
