"""What the tests of wheels share: the built files, and environments to install them into."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(
    *command: str | Path, cwd: Path | None = None, check: bool = True, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run it outside the checkout, with nothing of this process's Python settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CAKE_"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


class Environment:
    """A virtual environment of its own."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "virtualenv", "-q", folder)
        self.folder = folder
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")

    def pip(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "python", "-m", "pip", *words, cwd=self.folder, check=check)

    def python(self, code: str, **more: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.folder, **more).stdout.strip()


class House:
    """An sdist of every package, and the wheel built from that sdist alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, package: Path, *words: str) -> None:
        run(sys.executable, "-m", "build", "--no-isolation", *words, "-o", self.folder, package)

    def editable(self, name: str) -> Path:
        """The wheel that `pip install -e` makes and installs: a pointer to the checkout."""
        folder = self.folder / "editable" / name
        if not folder.exists():
            words = ["-m", "hatchling", "build", "-t", "wheel:editable", "-d", folder]
            run(sys.executable, *words, cwd=ROOT / "packages" / name)
        (wheel,) = folder.iterdir()
        return wheel

    def wheel(self, name: str) -> Path:
        (wheel,) = self.folder.glob(f"{name.replace('-', '_')}-*.whl")
        return wheel

    def sdist(self, name: str) -> Path:
        (sdist,) = self.folder.glob(f"{name.replace('-', '_')}-*.tar.gz")
        return sdist


@pytest.fixture(scope="session", name="run")
def _run() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    house = House(tmp_path_factory.mktemp("house"))
    for pyproject in sorted(ROOT.glob("packages/*/pyproject.toml")):
        house.add(pyproject.parent)
    return house


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    return lambda: Environment(tmp_path_factory.mktemp("environment") / "env")


@pytest.fixture
def later(house: House, tmp_path: Path) -> Callable[..., Path]:
    """Makes the wheel of a later version: ``later(name, version)``."""

    def make(name: str, version: str) -> Path:
        with tarfile.open(house.sdist(name)) as sdist:
            sdist.extractall(tmp_path, filter="data")
        (folder,) = tmp_path.glob(f"{name.replace('-', '_')}-*")
        settings = folder / "pyproject.toml"
        lines = settings.read_text(encoding="utf-8").splitlines()
        (index,) = (i for i, line in enumerate(lines) if line.startswith("version = "))
        lines[index] = f'version = "{version}"'
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part = folder / "src/cake" / name.removeprefix("cake-")
        (part / "_later.py").write_text(f"VERSION = {version!r}\n", encoding="utf-8")
        made = House(tmp_path / "later")
        made.add(folder, "--wheel")
        return made.wheel(name)

    return make
