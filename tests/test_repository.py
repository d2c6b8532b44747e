"""How the repository hangs together: distributions alike, one version of each tool."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def project(package: Path) -> str:
    return (package / "pyproject.toml").read_text(encoding="utf-8")


def test_no_distribution_owns_the_namespace() -> None:
    assert list(ROOT.glob("packages/*/src/cake/__init__.py*")) == []


def test_every_package_is_known_to_nox_and_mypy() -> None:
    nox = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert len(PACKAGES) >= 2
    for package in PACKAGES:
        assert f'"{package.name}"' in nox
        assert f'"packages/{package.name}/src"' in settings


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_has_the_common_shape(package: Path) -> None:
    text = project(package)
    assert f'name = "{package.name}"' in text
    assert 'requires-python = ">=3.10"' in text
    assert 'build-backend = "hatchling.build"' in text
    assert 'packages = ["src/cake"]' in text
    for name in (
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "tests",
        f"src/cake/{package.name.removeprefix('cake-')}",
    ):
        assert (package / name).exists(), name
    assert (package / "src/cake" / package.name.removeprefix("cake-") / "py.typed").exists()
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_tools_have_one_version() -> None:
    """What `nox -s lint` runs is what the hooks of pre-commit run."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    nox = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for tool in ("ruff", "clang-format"):
        found = set(re.findall(rf'"{tool}==([\d.]+)"', hooks + nox))
        assert len(found) == 1, (tool, found)


def test_releases_are_built_by_one_hatchling() -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("noxfile.py", "RELEASING.md")]
    pinned = {version for text in texts for version in re.findall(r"hatchling==([\d.]+)", text)}
    named = re.findall(r'^HATCHLING = "([\d.]+)"', (ROOT / "tools/release_build.py").read_text("utf-8"), re.M)
    assert pinned == set(named)
    assert len(named) == 1


@pytest.mark.parametrize("op", ["gdn", "kda", "hybrid"])
def test_demo_trains_and_repeats_its_bits(tmp_path: Path, op: str) -> None:
    """The demo's own verdict is its exit status: 0 only if the repeated steps have the same bits."""
    words = ["examples/demo/train.py", "--smoke", "--op", op, "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "report.json", "sample.txt"}
    assert "same bits" in done.stdout
    assert '"cake-core"' in done.stdout  # the manifest
