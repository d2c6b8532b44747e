"""tools/compat.py on a throw-away repository: two cores, two versions of an op, none of which needs torch."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = [{dependencies}]

[tool.hatch.build.targets.wheel]
packages = ["src/cake"]

[tool.hatch.build.targets.sdist]
include = ["/src", "/tests", "/CHANGELOG.md"]
"""
TEST = """\
import pytest
import cake.core, cake.toy

def test_it():
    assert "site-packages" in cake.toy.__file__
    assert cake.core.NUMBER >= cake.toy.NEEDS

@pytest.mark.slow
def test_slowly():
    raise AssertionError("not asked for")
"""
CONTRACT = """\
from pathlib import Path
import cake.toy

def test_contract():
    assert cake.toy.NEEDS == 20
    assert (Path(__file__).parents[2] / "packages/cake-toy/tests/test_it.py").is_file()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _identity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{name}_NAME", "somebody")
            patch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
        patch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path_factory.mktemp("git") / "config"))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    yield importlib.import_module("compat")
    sys.path.remove(str(ROOT / "tools"))


def run(script: str, repo: Path, *words: str, ok: bool = True) -> str:
    command = [sys.executable, str(ROOT / "tools" / script), "--repo", str(repo), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def commit(repo: Path) -> None:
    for words in (["add", "-A"], ["commit", "-q", "-m", "change"]):
        subprocess.run(["git", "-C", str(repo), *words], check=True)


def put(repo: Path, name: str, version: str, init: str, dependencies: str = "") -> None:
    folder = repo / "packages" / name
    write(folder / "pyproject.toml", PYPROJECT.format(name=name, version=version, dependencies=dependencies))
    write(folder / "src/cake" / name.removeprefix("cake-") / "__init__.py", init)
    write(folder / "tests/test_it.py", TEST if name == "cake-toy" else "")
    write(folder / "CHANGELOG.md", f"# Changelog\n\n## {version} (2026-01-31)\n\n- It.\n")


def bounds(low: str, high: str) -> str:
    return f'"cake-core>={low},<{high}"'


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Released: cake-core 0.1.0, 0.2.0, cake-toy 0.1.0 (for 0.1). The tree has 0.2.1 and 0.2.0 (for 0.2)."""
    repo = tmp_path_factory.mktemp("repo")
    subprocess.run(["git", "init", "-q", "-b", "main", str(repo)], check=True)
    write(repo / "tools/vendor_cake.py", "")
    put(repo, "cake-core", "0.1.0", "NUMBER = 10\n")
    put(repo, "cake-toy", "0.1.0", "NEEDS = 10\n", bounds("0.1", "0.2"))
    commit(repo)
    run("release.py", repo, "cut", "cake-core", "cake-toy")
    put(repo, "cake-core", "0.2.0", "NUMBER = 20\n")
    commit(repo)
    run("release.py", repo, "cut", "cake-core")
    put(repo, "cake-core", "0.2.1", "NUMBER = 21\n")
    put(repo, "cake-toy", "0.2.0", "NEEDS = 20\n", bounds("0.2", "0.3"))
    write(repo / "tests/ops/test_contract.py", CONTRACT)
    commit(repo)
    return repo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they are built and installed, and what they share."""
    return tmp_path_factory.mktemp("compat")


def compat(repo: Path, folder: Path, *words: str, ok: bool = True) -> tuple[dict[tuple[str, str], str], str]:
    """{(op, core): result} of the table, and everything that was printed."""
    text = run("compat.py", repo, "--folder", str(folder), "--torch", "pytest", *words, ok=ok)
    rows = [
        re.split(r" {2,}", line) for line in text[text.rfind("\nop ") :].splitlines() if "cake-toy" in line
    ]
    return {(row[1], row[2]): row[3] for row in rows}, text


def test_every_pair(repo: Path, folder: Path) -> None:
    found, text = compat(repo, folder)
    old, new = "0.1.0", "tree (0.2.0)"
    assert found == {
        (old, "0.1.0"): "passed",
        (old, "0.2.0"): "refused",
        (old, "tree (0.2.1)"): "refused",
        (old, "99.0.0"): "refused",
        (new, "0.1.0"): "refused",
        (new, "0.2.0"): "passed",
        (new, "tree (0.2.1)"): "passed",
        (new, "99.0.0"): "refused",
    }
    assert "8 pairs, all as they must be" in text
    assert re.search(r"^cake-toy +0\.1\.0 .* 1 passed, 1 deselected", text, re.MULTILINE)
    assert re.search(r"^cake-toy +tree .* 2 passed, 1 deselected", text, re.MULTILINE)
    assert "built cake-core 0.2.0 from its commit" in text


def test_only_the_working_tree(repo: Path, folder: Path) -> None:
    found, text = compat(repo, folder, "--tree-only", "--op", "toy", "--", "-x")
    assert sorted(found) == [
        ("0.1.0", "99.0.0"),
        ("0.1.0", "tree (0.2.1)"),
        ("tree (0.2.0)", "0.1.0"),
        ("tree (0.2.0)", "0.2.0"),
        ("tree (0.2.0)", "99.0.0"),
        ("tree (0.2.0)", "tree (0.2.1)"),
    ]
    assert "built cake-" not in text  # nor is what was released built again


def test_a_core_that_breaks_an_op_fails_its_pairs(repo: Path, folder: Path) -> None:
    """What lies in the working tree counts, committed or not."""
    init = repo / "packages/cake-core/src/cake/core/__init__.py"
    init.write_text("NUMBER = 3\n")
    try:
        found, text = compat(repo, folder, "--tree-only", ok=False)
    finally:
        init.write_text("NUMBER = 21\n")
    assert found[("tree (0.2.0)", "tree (0.2.1)")] == "FAILED"
    assert found[("tree (0.2.0)", "0.2.0")] == "passed"
    assert "assert 3 >= 20" in text
    assert "1 not as they must be" in text


def test_tests_without_an_end_are_stopped(repo: Path, folder: Path) -> None:
    test = repo / "packages/cake-toy/tests/test_it.py"
    test.write_text("import time\n\ndef test_it():\n    time.sleep(600)\n")
    try:
        found, _ = compat(repo, folder, "--tree-only", "--minutes", "0.05", ok=False)
    finally:
        test.write_text(TEST)
    assert found[("tree (0.2.0)", "tree (0.2.1)")] == "TOO LONG"


@pytest.mark.parametrize(
    ("dependencies", "why"),
    [
        ('"cake-core>=0.2"', "accepts any later cake-core"),
        ("", "does not require cake-core"),
        ("\"cake-core>=0.2,<0.3; extra == 'x'\"", "does not require cake-core"),
    ],
)
def test_an_op_without_bounds_is_refused(repo: Path, folder: Path, dependencies: str, why: str) -> None:
    put(repo, "cake-toy", "0.2.0", "NEEDS = 20\n", dependencies)
    try:
        assert why in compat(repo, folder, ok=False)[1]
    finally:
        put(repo, "cake-toy", "0.2.0", "NEEDS = 20\n", bounds("0.2", "0.3"))


def test_an_unknown_op_is_refused(repo: Path, folder: Path) -> None:
    assert (
        "no cake-pie here; there are: cake-core, cake-toy" in compat(repo, folder, "--op", "pie", ok=False)[1]
    )


def test_a_resolver_that_takes_a_pair_outside_the_bounds_is_noticed(
    repo: Path, folder: Path, tool: ModuleType, tmp_path: Path
) -> None:
    house = folder / "house"
    (core,) = (stage for stage in tool.stages(repo, house, "cake-core") if stage.label == tool.TREE)
    (op,) = (stage for stage in tool.stages(repo, house, "cake-toy") if stage.label == tool.TREE)
    base = tool.Base(next(folder.glob("base-*")), "pytest", [core, op])
    result = tool.try_pair(tool.Pair(op, core, allowed=False), base, tmp_path, 1.0, [])
    assert (result.ok, result.word) == (False, "NOT REFUSED")


def test_a_release_is_tested_by_the_contract_of_its_commit(
    repo: Path, folder: Path, tool: ModuleType, tmp_path: Path
) -> None:
    """The working tree's may ask for what the release didn't promise."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(repo), str(clone)], check=True)
    run("release.py", clone, "cut", "cake-toy")
    write(clone / "tests/ops/test_contract.py", "def test_contract():\n    assert 0\n")
    stages = {stage.label: stage for stage in tool.stages(clone, folder / "house", "cake-toy")}
    assert stages["0.1.0"].contract is None
    assert (stages["0.2.0"].contract / "test_contract.py").read_text() == CONTRACT
    assert (stages[tool.TREE].contract / "test_contract.py").read_text() != CONTRACT
