"""Wheels and sdists in clean environments: what users install, without the checkout.

Run by `nox -s wheels`; needs build, hatchling, virtualenv and a package index.
"""

from __future__ import annotations

import configparser
import functools
import json
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = [package.name for package in PACKAGES]
OPS = [name for name in NAMES if name != "cake-core"]
TORCH = os.environ.get("CAKE_TEST_TORCH", "torch==2.13.0")

pytestmark = pytest.mark.slow


KERNELS = [name for name in OPS if list(ROOT.glob(f"packages/{name}/src/**/build.json"))]
TOGETHER = [(name,) for name in OPS] + ([tuple(OPS)] if len(OPS) > 1 else [])


@pytest.fixture(scope="session")
def installed(house: Any, new_environment: Any) -> Callable[[tuple[str, ...]], Any]:
    """What `pip install` of some wheels makes, with the wheel of cake-core findable; made once for each.

    The first is made of nothing. The others begin with what the first has installed besides cake, which
    saves them torch.
    """

    @functools.cache
    def make(names: tuple[str, ...]) -> Any:
        environment = new_environment()
        if names != TOGETHER[0]:
            first = make(TOGETHER[0]).site
            for path in first.iterdir():
                target = environment.site / path.name
                if path.is_dir() and not path.name.startswith(("cake", "__")) and not target.exists():
                    shutil.copytree(path, target, copy_function=os.link)
                elif path.suffix == ".py" and not target.exists():
                    os.link(path, target)
        wheels = [house.wheel(name) for name in names]
        environment.pip("install", "-q", "--find-links", house.folder, TORCH, *wheels)
        environment.names = names
        return environment

    return make


@pytest.fixture(params=TOGETHER, ids="+".join)
def clean(installed: Callable[[tuple[str, ...]], Any], request: pytest.FixtureRequest) -> Any:
    """The environment of each op alone, then of all ops."""
    return installed(request.param)


def version_of(name: str) -> str:
    text = (ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    return str(version)


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_its_own_part_of_the_namespace(house: Any, name: str) -> None:
    part = name.removeprefix("cake-")
    with zipfile.ZipFile(house.wheel(name)) as wheel:
        files = [file for file in wheel.namelist() if ".dist-info/" not in file]
        licences = [file for file in wheel.namelist() if file.endswith("licenses/LICENSE")]
    assert [file for file in files if not file.startswith(f"cake/{part}/")] == []
    assert f"cake/{part}/py.typed" in files
    assert len(licences) == 1


@pytest.mark.parametrize("name", NAMES)
def test_wheel_holds_every_file_of_the_source(house: Any, run: Any, name: str) -> None:
    """CUDA sources and frozen copies among them; nothing is left behind and nothing else creeps in."""
    options = ["-z", "--cached", "--others", "--exclude-standard"]
    listed = run("git", "ls-files", *options, "--", f"packages/{name}/src", cwd=ROOT).stdout
    prefix = f"packages/{name}/src/"
    sources = {file.removeprefix(prefix) for file in listed.split("\0") if file and (ROOT / file).exists()}
    with zipfile.ZipFile(house.wheel(name)) as wheel:
        held = {file for file in wheel.namelist() if ".dist-info/" not in file}
    assert held == sources


@pytest.mark.parametrize("name", OPS)
def test_records_name_files_that_the_wheel_holds(house: Any, name: str) -> None:
    with zipfile.ZipFile(house.wheel(name)) as wheel:
        held = set(wheel.namelist())
        manifests = [file for file in held if file.endswith("/build.json")]
        assert bool(manifests) == any(file.endswith(".cu") for file in held)
        for file in manifests:
            folder = file.rpartition("/")[0]
            for record in json.loads(wheel.read(file))["records"]:
                assert [s for s in record["sources"] if f"{folder}/{s}" not in held] == []


@pytest.mark.parametrize("name", OPS)
def test_wheel_registers_its_op(house: Any, name: str) -> None:
    with zipfile.ZipFile(house.wheel(name)) as wheel:
        (file,) = (file for file in wheel.namelist() if file.endswith("entry_points.txt"))
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.read_string(wheel.read(file).decode())
    op = name.removeprefix("cake-")
    assert dict(parser["cake.ops"]) == {op: f"cake.{op}.spec:SPEC"}


@pytest.mark.parametrize("name", NAMES)
def test_sdist_carries_its_tests(house: Any, name: str) -> None:
    with tarfile.open(house.sdist(name)) as sdist:
        files = [file.partition("/")[2] for file in sdist.getnames()]
    assert any(file.startswith("tests/test_") for file in files)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= set(files)


def test_clean_install_is_of_these_wheels(clean: Any, house: Any) -> None:
    """Not of some other distribution that an index has under the name."""
    for name in ("cake-core", *clean.names):
        with zipfile.ZipFile(house.wheel(name)) as wheel:
            for file in wheel.namelist():
                if file.startswith("cake/"):
                    assert (clean.site / file).read_bytes() == wheel.read(file), file
    assert clean.pip("check").returncode == 0


def test_clean_install_imports_and_has_nothing_of_other_ops(clean: Any) -> None:
    parts = [name.removeprefix("cake-") for name in ("cake-core", *clean.names)]
    code = (
        "import sys, importlib, cake\n"
        f"modules = [importlib.import_module('cake.' + part) for part in {parts}]\n"
        "print(getattr(cake, '__file__', None), *(m.__version__ for m in modules), 'torch' in sys.modules)"
    )
    versions = [version_of(name) for name in ("cake-core", *clean.names)]
    assert clean.python(code) == " ".join(["None", *versions, "False"])
    assert sorted(path.name for path in (clean.site / "cake").iterdir()) == sorted(parts)
    listed = {line.split()[0] for line in clean.pip("list").stdout.splitlines() if line.startswith("cake")}
    assert listed == {"cake-core", *clean.names}


def test_clean_install_has_the_command(clean: Any, run: Any) -> None:
    ops = [name.removeprefix("cake-") for name in clean.names]
    listed = run(clean.bin / "cake", "ops").stdout
    known = {line.split()[0] for line in listed.splitlines()[1:] if line.strip()}
    assert {name for name in OPS if name.removeprefix("cake-") in known} == set(clean.names)
    assert "doctor" in run(clean.bin / "cake", "--help").stdout
    manifest = json.loads(run(clean.bin / "cake", "manifest").stdout)
    assert list(manifest["ops"]) == ops
    for name, op in zip(clean.names, ops, strict=True):
        assert manifest["ops"][op]["version"] == version_of(name)
    assert manifest["broken_ops"] == {}


def test_clean_install_runs_what_the_readme_says(clean: Any) -> None:
    """Forward and backward on a CPU, from the wheels alone."""
    for name in clean.names:
        text = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert any(".backward()" in block for block in blocks), name
        for block in blocks:
            clean.python(block)


def test_sdists_tests_are_collected_against_the_wheels(
    clean: Any, house: Any, run: Any, tmp_path: Path
) -> None:
    """They import what is installed and nothing from the checkout or from each other."""
    clean.pip("install", "-q", "pytest>=8", "pytest-timeout>=2.3")
    for name in ("cake-core", *clean.names):
        with tarfile.open(house.sdist(name)) as sdist:
            sdist.extractall(tmp_path / name, filter="data")
        (unpacked,) = (tmp_path / name).iterdir()
        shutil.rmtree(unpacked / "src")
        words = [
            "-q",
            "--collect-only",
            "--import-mode=importlib",
            "--strict-markers",
            "-p",
            "no:cacheprovider",
        ]
        done = run(clean.bin / "python", "-m", "pytest", *words, "tests", cwd=unpacked)
        assert "error" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("op", OPS)
def test_a_core_outside_the_bounds_is_refused(house: Any, new_environment: Any, later: Any, op: str) -> None:
    """A core whose interface may differ does not go with this op: pip's resolver says so."""
    environment = new_environment()
    core = later("cake-core", "99.0.0")
    done = environment.pip("install", "--find-links", house.folder, core, house.wheel(op), check=False)
    assert done.returncode != 0
    assert "ResolutionImpossible" in done.stderr
    assert re.search(rf"{op} \S+ depends on cake-core<\S+", done.stdout + done.stderr)
    environment.pip("install", "-q", "--no-deps", core, house.wheel(op))
    done = environment.pip("check", check=False)
    assert done.returncode != 0
    assert re.search(rf"{op} \S+ has requirement cake-core\S+, but you have cake-core 99.0.0", done.stdout)


def everything_but_nvcc(folder: Path) -> str:
    """A PATH with every program of this machine's but nvcc."""
    folder.mkdir()
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in sorted(place.iterdir()) if place.is_dir() else []:
            if not program.name.startswith("nvcc") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    assert shutil.which("nvcc", path=str(folder)) is None
    return str(folder)


USE = """
import sys
from cake.core import ToolchainError, loader, toolchain
try:
    raise SystemExit(f"there is an nvcc: {toolchain.find_nvcc()}")
except ToolchainError:
    pass
with loader.no_build():
    for package, record in loader.libraries(sys.argv[1], "sm_90a"):
        module = loader.load(sys.argv[1], record.library, arch="sm_90a")
        print(record.library, all(module.implements_function(name) for name in record.functions))
"""


@pytest.mark.parametrize("name", KERNELS)
def test_the_extra_nvcc_compiles_and_its_archive_needs_no_compiler(
    installed: Callable[[tuple[str, ...]], Any], house: Any, run: Any, tmp_path: Path, name: str
) -> None:
    """Without a CUDA toolkit pip brings one; what it built runs where there is neither that nor g++.

    The last tests of the file: they install a compiler into the environment.
    """
    clean = installed((name,))
    op, archive = name.removeprefix("cake-"), tmp_path / "kernels.zip"
    clean.pip("install", "-q", "--find-links", house.folder, f"{name}[nvcc] @ {house.wheel(name).as_uri()}")
    cake = clean.bin / "cake"
    here = {
        "PATH": everything_but_nvcc(tmp_path / "programs"),
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "CAKE_CACHE_DIR": str(tmp_path / "built"),
    }
    found = json.loads(run(cake, "doctor", "--json", check=False, **here).stdout)
    assert "found through wheel" in found["sections"]["Compiler"]["nvcc"]
    run(cake, "prebuild", op, "--arch", "sm_90a", **here)
    run(cake, "cache", "export", "--arch", "sm_90a", archive, op, **here)
    packages = [
        line.split()[0] for line in clean.pip("list").stdout.splitlines() if line.startswith("nvidia-")
    ]
    clean.pip("uninstall", "-q", "-y", *packages)
    there = {**here, "PATH": str(tmp_path / "nothing"), "CAKE_CACHE_DIR": str(tmp_path / "imported")}
    run(cake, "cache", "import", archive, **there)
    lines = run(clean.bin / "python", "-c", USE, op, **there).stdout.split("\n")
    assert [line for line in lines if line.endswith(" True")] == [line for line in lines if line]
    assert len(lines) > 1
