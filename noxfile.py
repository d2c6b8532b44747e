"""What can be done with this repository, each with `python3 -m nox -s NAME`.

Needs Python 3.10 or newer and nox; everything else is installed into environments under .nox/. The sessions
that need torch share one environment (.nox/cake-3.x), so that torch is installed once. Nothing here needs a
GPU or nvcc: `kernels` takes NVIDIA's compiler from PyPI where none is found.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = [ROOT / "packages" / name for name in ("cake-core", "cake-gdn", "cake-kda")]

TORCH = "torch==2.13.0"
RUFF = "ruff==0.17.6"
CLANG_FORMAT = "clang-format==23.1.5"
TESTING = ["pytest>=8", "pytest-xdist>=3.5", "pytest-timeout>=2.3", "numpy"]
DEMO = ["matplotlib>=3.8", "plotext==5.3.2"]
TYPING = ["mypy==2.4.1"]
FRAMEWORKS = ["transformers>=5", "flash-linear-attention>=0.5.2,<0.7", "triton; platform_system == 'Linux'"]
DOCUMENTING = ["pdoc>=15"]
FIND_NVCC = """
from cake.core import ToolchainError, toolchain
try:
    print(toolchain.find_nvcc().path)
except ToolchainError:
    pass
"""
COMPILE = """
import sys
from cake.core import build, loader
for folder in sys.argv[1:]:
    for record in build.read_package(folder).records:
        loader.load_from(folder, record.library, arch=record.arch)
        print("compiled", record.library)
"""
BUILDING = [
    "build>=1.2",
    "hatchling==1.33.0",  # the version that builds releases: it decides their bytes
    "packaging>=22",
    "tomli>=2; python_version < '3.11'",
    "virtualenv>=20.26",
]

# In a background job of a shell this signal is ignored, and children inherit that; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests", "kernels", "wheels"]
nox.options.error_on_external_run = True


def shared_python(session: nox.Session, *more: str, extras: str = "") -> str:
    """The Python of the shared environment: torch, the packages (editable, with `extras`) and `more`.

    The install is skipped when the same request was fulfilled before and no pyproject.toml has changed since.
    """
    home = ROOT / ".nox" / f"cake-{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "virtualenv", "--clear", "-q", str(home), external=True)
    stamp = home / "installed"
    editable = [word for package in PACKAGES for word in ("-e", f"{package}{extras}")]
    wanted = [TORCH, *editable, *more]
    settings = "".join((package / "pyproject.toml").read_text() for package in PACKAGES)
    request = "\n".join([*wanted, settings])
    done = stamp.read_text().split("\0") if stamp.exists() else []
    if request not in done:
        session.run(str(python), "-m", "pip", "install", "-q", *wanted, external=True)
        stamp.write_text("\0".join([*done, request]))
    else:
        session.log(f"{python} has what this session needs")
    return str(python)


def run(session: nox.Session, python: str, *command: str, log: bool = True, **env: str) -> None:
    """Run `python command…` of the shared environment, its scripts first on PATH, two threads at most."""
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    threads = os.environ.get("OMP_NUM_THREADS", "1" if "-n" in command else str(min(os.cpu_count() or 1, 8)))
    full = {"PATH": path, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "FORCE_COLOR": None, **env}
    session.run(python, *command, env=full, external=True, log=log)


def workers() -> str:
    return os.environ.get("CAKE_TEST_WORKERS") or str(min(os.cpu_count() or 1, 8))


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small language model through cake (about three minutes on two cores, far larger on a GPU)."""
    python = shared_python(session, *DEMO)
    run(session, python, "examples/demo/train.py", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU: each package's own and the repository's."""
    python = shared_python(session, *DEMO, *TESTING)
    where = session.posargs or ["-m", "not gpu", "packages", "kernels", "tests", "--ignore=tests/wheels"]
    run(session, python, "-m", "pytest", "-n", workers(), "--dist=worksteal", "--timeout=900", *where)


@nox.session(reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Ruff (rules and format) and clang-format."""
    session.install("-q", RUFF, CLANG_FORMAT)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    cuda = sorted(
        str(path.relative_to(ROOT))
        for root in (ROOT / "kernels", ROOT / "packages")
        for path in root.rglob("*.*")
        if path.suffix in (".cu", ".cuh", ".h", ".cc") and "_vendor" not in path.parts
    )
    if cuda:
        session.run("clang-format", "--dry-run", "--Werror", *cuda)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over the sources of every package."""
    python = shared_python(session, *TESTING, *TYPING)
    for package in PACKAGES:
        run(session, python, "-m", "mypy", str(package.relative_to(ROOT) / "src"))


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Compile every CUDA library for sm_90a and check the frozen copies; brings nvcc if there is none."""
    python = shared_python(session)
    run(session, python, "tools/vendor_cake.py", "check")
    cache = ROOT / ".nox" / "kernels"
    shutil.rmtree(cache, ignore_errors=True)  # so that everything is compiled, each time
    here = {"CAKE_CACHE_DIR": str(cache)}
    brought = not session.run(python, "-c", FIND_NVCC, external=True, silent=True, log=False).strip()
    if brought:
        session.log("no nvcc here: installing NVIDIA's compiler from PyPI (the extra nvcc)")
        python = shared_python(session, *TESTING, extras="[nvcc]")
    run(session, python, "-m", "cake.core", "prebuild", "--arch", "sm_90a", **here)
    # Other kernels with a build.json are written for the place where an op carries them, and built there.
    session.log("compiling the test kernels")
    run(session, python, "-c", COMPILE, str(ROOT / "kernels" / "tests"), log=False, **here)
    if brought:  # otherwise `tests` has run them
        run(session, python, "-m", "pytest", "-m", "nvcc and not gpu", "packages", "kernels", **here)


@nox.session(reuse_venv=True)
def wheels(session: nox.Session) -> None:
    """Build every wheel and sdist, then install them into clean environments and use them there."""
    session.install("-q", *BUILDING, *TESTING)
    words = ["--confcutdir=tests/wheels", "-n", workers(), "--dist=loadfile", "--timeout=1200"]
    session.run("pytest", *words, "tests/wheels", *session.posargs)


@nox.session(reuse_venv=True)
def compat(session: nox.Session) -> None:
    """Test every version of every op with every cake-core that it accepts; `-- --tree-only` for a part."""
    session.install("-q", *BUILDING)
    words = session.posargs if "--" in session.posargs else [*session.posargs, "--", "-n", workers()]
    session.run("python", "-u", "tools/compat.py", "--torch", TORCH, *words)


@nox.session(venv_backend="none")
def frameworks(session: nox.Session) -> None:
    """Models of transformers, and flash-linear-attention itself, run through cake on this machine."""
    python = shared_python(session, *TESTING, *FRAMEWORKS)
    where = ["tests/frameworks", "tests/ops/test_fla.py", "packages/cake-core/tests/test_fla.py"]
    marks = [] if shutil.which("nvidia-smi") else ["-m", "not gpu"]
    run(
        session,
        python,
        "-m",
        "pytest",
        "-n",
        workers(),
        "--timeout=900",
        *(session.posargs or [*marks, *where]),
    )


@nox.session(venv_backend="none")
def api(session: nox.Session) -> None:
    """The API reference, made of the docstrings, in build/api."""
    python = shared_python(session, *DOCUMENTING)
    run(session, python, "tools/api_reference.py", *(session.posargs or ["build/api"]))


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time the kernels on this machine's GPU: `nox -s bench -- gdn --vs flashqla`."""
    python = shared_python(session)
    run(session, python, "-m", "cake.core", "bench", *(session.posargs or ["gdn"]))
