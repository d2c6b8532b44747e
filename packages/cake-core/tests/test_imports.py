"""Importing cake, and asking the command for help, costs next to nothing: no torch, no disk, no search."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import cake.core

# Runs before the code under test: refuses every way of changing a file, and of starting another program.
GUARD = """
import os, sys

CHANGES = (
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "os.utime", "shutil.", "tempfile.", "subprocess.Popen", "os.system", "os.exec", "os.fork", "socket.",
)

def hook(event, args):
    if event == "open" and args[0] is not None:
        path, mode, flags = args
        if (mode and any(c in mode for c in "wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise SystemExit(f"opened {path} for writing")
    elif event.startswith(CHANGES):
        raise SystemExit(f"{event} {args}")

sys.dont_write_bytecode = True
sys.addaudithook(hook)
"""
HEAVY = "{'torch', 'numpy', 'tvm_ffi', 'rich', 'filelock', 'platformdirs', 'packaging', 'ctypes'}"


def run(code: str, tmp_path: Path, **env: str) -> str:
    """Run ``GUARD`` and ``code`` in a fresh process whose home does not exist; returns what it prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CAKE_", "XDG_"))}
    home = tmp_path / "home"
    done = subprocess.run(
        [sys.executable, "-c", GUARD + code],
        capture_output=True,
        text=True,
        env={**clean, "HOME": str(home), **env},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not home.exists()
    return done.stdout


IMPORTS = ["cake.core", "cake.core.hooks", "cake.core.spec", "cake.core.config", "cake.core.env"]


@pytest.mark.parametrize("module", IMPORTS)
def test_an_import_loads_nothing_heavy_and_changes_nothing(module: str, tmp_path: Path) -> None:
    run(f"import {module}\nassert not {HEAVY} & set(sys.modules), {HEAVY} & set(sys.modules)\n", tmp_path)


def test_importing_gdn_loads_nothing_heavy_and_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cake.gdn", reason="cake-gdn is not installed")
    run(f"import cake.core, cake.gdn\nassert not {HEAVY} & set(sys.modules), sys.modules\n", tmp_path)


@pytest.mark.parametrize("words", [["--help"], ["prebuild", "--help"], ["doctor", "-h"], ["--version"]])
def test_help_loads_no_torch_and_changes_nothing(words: list[str], tmp_path: Path) -> None:
    out = run(
        "from cake.core.cli import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit as done:\n"
        "    assert done.code == 0\n"
        "assert 'torch' not in sys.modules\n",
        tmp_path,
    )
    assert "cake" in out


def test_the_hooks_and_the_list_of_ops_load_no_torch(tmp_path: Path, toy_folder: Path) -> None:
    code = (
        "import argparse\n"
        "from cake.core import hooks, registry\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--toy-backend')\n"
        "hooks.add_arguments(parser)\n"
        "args = parser.parse_args(['--toy-backend', 'cake'])\n"
        "hooks.validate_args(args)\n"
        "hooks.configure(args)\n"
        "hooks.release()\n"
        "hooks.SOURCES\n"
        "assert 'toy' in [spec.name for spec in registry.ops()]\n"
        "assert 'torch' not in sys.modules and 'tvm_ffi' not in sys.modules\n"
    )
    run(code, tmp_path, PYTHONPATH=str(toy_folder))


def seconds(*words: str) -> float:
    """The processor time of Python with ``words``, the least of five runs.

    A start waits for nothing, so on an idle machine this is the time that passes.
    """
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


@pytest.mark.parametrize(
    "words", [["-c", "import cake.core"], ["-m", "cake.core", "--help"]], ids=["import", "help"]
)
def test_the_start_takes_less_than_three_tenths_of_a_second(words: list[str]) -> None:
    assert seconds(*words) < 0.3


def test_importing_gdn_takes_less_than_three_tenths_of_a_second() -> None:
    pytest.importorskip("cake.gdn", reason="cake-gdn is not installed")
    assert seconds("-c", "import cake.core, cake.gdn") < 0.3


def test_every_public_name_is_there_and_listed() -> None:
    assert len(set(cake.core.__all__)) == len(cake.core.__all__)
    for name in cake.core.__all__:
        assert getattr(cake.core, name) is not None, name
    assert set(cake.core.__all__) <= set(dir(cake.core))
    with pytest.raises(AttributeError, match="colour"):
        cake.core.colour  # noqa: B018 - reading the attribute is the test


@pytest.mark.parametrize("name", ["manifest", "prebuild"])
def test_no_module_hides_a_function_of_the_package(name: str, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, cake.core\n"
        "import cake.core.cli.manifest, cake.core.provenance, cake.core._prebuild\n"
        f"assert {name!r} not in [m.name for m in pkgutil.iter_modules(cake.core.__path__)]\n"
        f"assert callable(cake.core.{name})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_the_namespace_belongs_to_nobody() -> None:
    import cake

    assert getattr(cake, "__file__", None) is None
    assert cake.__path__
    assert (Path(cake.core.__file__).parent / "py.typed").is_file()
