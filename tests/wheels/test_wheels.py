"""Wheels and sdists in clean environments: what users install, without the checkout.

Run by `nox -s wheels`; needs build, hatchling, virtualenv and a package index.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]
OPS = [name for name in NAMES if name != "cake-core"]
TORCH = os.environ.get("CAKE_TEST_TORCH", "torch==2.13.0")

pytestmark = pytest.mark.slow


def run(
    *command: str | Path, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run it outside the checkout, with nothing of this process's Python settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CAKE_"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False
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

    def pip(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(self.bin / "python", "-m", "pip", *words, cwd=self.folder, check=check)

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.folder).stdout.strip()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of every package, and the wheel built from that sdist alone."""
    folder = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, package)
    return folder


@pytest.fixture(scope="session")
def clean(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `pip install` of the cake-gdn wheel makes, with cake-core's wheel findable."""
    environment = Environment(tmp_path_factory.mktemp("clean"))
    environment.pip("install", "-q", "--find-links", house, TORCH, wheel_of(house, "cake-gdn"))
    return environment


def version_of(name: str) -> str:
    text = (ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    return str(version)


def wheel_of(house: Path, name: str) -> Path:
    (wheel,) = house.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def sdist_of(house: Path, name: str) -> Path:
    (sdist,) = house.glob(f"{name.replace('-', '_')}-*.tar.gz")
    return sdist


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_its_own_part_of_the_namespace(house: Path, name: str) -> None:
    part = name.removeprefix("cake-")
    with zipfile.ZipFile(wheel_of(house, name)) as wheel:
        files = [file for file in wheel.namelist() if ".dist-info/" not in file]
        licences = [file for file in wheel.namelist() if file.endswith("licenses/LICENSE")]
    assert [file for file in files if not file.startswith(f"cake/{part}/")] == []
    assert f"cake/{part}/py.typed" in files
    assert len(licences) == 1


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_every_file_of_the_source(house: Path, name: str) -> None:
    """CUDA sources and frozen copies among them; nothing is left behind and nothing else creeps in."""
    options = ["-z", "--cached", "--others", "--exclude-standard"]
    listed = run("git", "ls-files", *options, "--", f"packages/{name}/src", cwd=ROOT).stdout
    prefix = f"packages/{name}/src/"
    sources = {file.removeprefix(prefix) for file in listed.split("\0") if file and (ROOT / file).exists()}
    with zipfile.ZipFile(wheel_of(house, name)) as wheel:
        held = {file for file in wheel.namelist() if ".dist-info/" not in file}
    assert held == sources


@pytest.mark.parametrize("name", OPS)
def test_records_name_files_that_the_wheel_holds(house: Path, name: str) -> None:
    with zipfile.ZipFile(wheel_of(house, name)) as wheel:
        held = set(wheel.namelist())
        manifests = [file for file in held if file.endswith("/build.json")]
        assert manifests
        for file in manifests:
            folder = file.rpartition("/")[0]
            for record in json.loads(wheel.read(file))["records"]:
                assert [s for s in record["sources"] if f"{folder}/{s}" not in held] == []


@pytest.mark.parametrize("name", OPS)
def test_wheel_registers_its_op(house: Path, name: str) -> None:
    with zipfile.ZipFile(wheel_of(house, name)) as wheel:
        (file,) = (file for file in wheel.namelist() if file.endswith("entry_points.txt"))
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.read_string(wheel.read(file).decode())
    op = name.removeprefix("cake-")
    assert dict(parser["cake.ops"]) == {op: f"cake.{op}.spec:SPEC"}


@pytest.mark.parametrize("name", NAMES)
def test_sdist_carries_its_tests(house: Path, name: str) -> None:
    with tarfile.open(sdist_of(house, name)) as sdist:
        files = [file.partition("/")[2] for file in sdist.getnames()]
    assert any(file.startswith("tests/test_") for file in files)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= set(files)


def test_clean_install_is_of_these_wheels(clean: Environment, house: Path) -> None:
    """Not of some other distribution that an index has under the name."""
    site = Path(clean.python("import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    for name in ("cake-core", "cake-gdn"):
        with zipfile.ZipFile(wheel_of(house, name)) as wheel:
            for file in wheel.namelist():
                if file.startswith("cake/"):
                    assert (site / file).read_bytes() == wheel.read(file), file
    assert clean.pip("check").returncode == 0


def test_clean_install_imports_and_has_nothing_of_other_ops(clean: Environment) -> None:
    code = (
        "import sys, importlib.util, cake, cake.core, cake.gdn;"
        "print(getattr(cake, '__file__', None), cake.core.__version__, cake.gdn.__version__,"
        " importlib.util.find_spec('cake.kda'), 'torch' in sys.modules)"
    )
    assert clean.python(code) == f"None {version_of('cake-core')} {version_of('cake-gdn')} None False"
    site = Path(clean.python("import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    assert sorted(path.name for path in (site / "cake").iterdir()) == ["core", "gdn"]
    assert "kda" not in clean.pip("list").stdout


def test_clean_install_has_the_command(clean: Environment) -> None:
    listed = run(clean.bin / "cake", "ops").stdout
    assert "gdn" in listed
    assert "kda" not in listed
    assert "doctor" in run(clean.bin / "cake", "--help").stdout
    manifest = json.loads(run(clean.bin / "cake", "manifest").stdout)
    assert list(manifest["ops"]) == ["gdn"]
    assert manifest["ops"]["gdn"]["version"] == version_of("cake-gdn")
    assert manifest["broken_ops"] == {}


def test_clean_install_trains(clean: Environment) -> None:
    """Forward and backward on a CPU, from the wheels alone."""
    code = """
import torch
from cake.gdn import chunk_gated_delta_rule
torch.manual_seed(0)
q, k = (torch.randn(1, 100, 1, 128).bfloat16().requires_grad_() for _ in range(2))
v = torch.randn(1, 100, 2, 128).bfloat16().requires_grad_()
g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=[0, 30, 100])
o.float().square().sum().backward()
print(all(bool(x.grad.isfinite().all()) and bool(x.grad.abs().sum() > 0) for x in (q, k, v)))
"""
    assert clean.python(code) == "True"


@pytest.mark.parametrize("name", NAMES)
def test_sdists_tests_are_collected_against_the_wheels(
    clean: Environment, house: Path, tmp_path: Path, name: str
) -> None:
    """They import what is installed and nothing from the checkout or from each other."""
    clean.pip("install", "-q", "pytest>=8", "pytest-timeout>=2.3")
    with tarfile.open(sdist_of(house, name)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    shutil.rmtree(unpacked / "src")
    words = ["-q", "--collect-only", "--import-mode=importlib", "--strict-markers", "-p", "no:cacheprovider"]
    done = run(clean.bin / "python", "-m", "pytest", *words, "tests", cwd=unpacked)
    assert "error" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("editable", ["cake-core", "cake-gdn"])
def test_namespace_survives_an_editable_beside_a_wheel(house: Path, tmp_path: Path, editable: str) -> None:
    environment = Environment(tmp_path / "mixed")
    for name in ("cake-core", "cake-gdn"):
        what = ["-e", ROOT / "packages" / name] if name == editable else [wheel_of(house, name)]
        environment.pip("install", "-q", "--no-deps", *what)
    code = "import cake.core, cake.gdn; print(cake.core.__file__); print(cake.gdn.__file__)"
    places = dict(zip(("cake-core", "cake-gdn"), environment.python(code).splitlines(), strict=True))
    for name, place in places.items():
        assert Path(place).is_relative_to(ROOT) == (name == editable)
        assert name == editable or Path(place).is_relative_to(environment.folder)


@pytest.mark.parametrize("op", OPS)
def test_a_core_outside_the_bounds_is_refused(house: Path, tmp_path: Path, op: str) -> None:
    """A core whose interface may differ does not go with this op."""
    copy = tmp_path / "cake-core"
    with tarfile.open(sdist_of(house, "cake-core")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    next(tmp_path.glob("cake_core-*")).rename(copy)
    settings = copy / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    this = f'version = "{version_of("cake-core")}"'
    assert this in text
    settings.write_text(text.replace(this, 'version = "99.0.0"'), encoding="utf-8")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", tmp_path / "next", copy)
    environment = Environment(tmp_path / "pair")
    words = ["install", "-q", "--no-index", "--no-deps"]
    environment.pip(*words, wheel_of(tmp_path / "next", "cake-core"), wheel_of(house, op))
    done = environment.pip("check", check=False)
    assert done.returncode != 0
    assert re.search(rf"{op} \S+ has requirement cake-core\S+, but you have cake-core 99.0.0", done.stdout)
