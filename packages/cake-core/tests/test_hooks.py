"""The four hooks and SOURCES, driven as a framework drives them: parsed here, run in spawned workers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cake.core import config, hooks

FRAMEWORK = """
import argparse, json, subprocess, sys
from cake.core import hooks

def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--toy-backend", default="own", choices=["own"])
    parser.add_argument("--lr", type=float, default=1e-3)
    hooks.add_arguments(parser)
    return parser.parse_args(argv)

WORKER = '''
import argparse, json, sys
from cake.core import config, hooks
hooks.validate_args(args := argparse.Namespace(**json.loads(sys.argv[1])))
hooks.configure(args)
print(json.dumps([config.variant("toy"), config.option("toy", "depth"), config.pool_bytes()]))
assert "torch" not in sys.modules
'''

if __name__ == "__main__":
    args = parse(sys.argv[1:])
    hooks.validate_args(args)
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, json.dumps(vars(args))], stdout=-1, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        print(worker.communicate()[0].strip())
        assert worker.returncode == 0
    assert "torch" not in sys.modules
"""


def framework(folder: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the framework with ``words`` on its command line."""
    program = tmp_path / "framework.py"
    program.write_text(FRAMEWORK)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(program), *words], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ["det", 3, 0]),
        ("--toy-backend cake", ["fast", 3, 0]),
        ("--toy-backend cake --deterministic-mode", ["det", 3, 0]),
        ("--toy-backend cake --cake-toy-variant det --cake-toy-depth 5", ["det", 5, 0]),
        ("--toy-backend cake --cake-workspace-pool-bytes 2KiB", ["fast", 3, 2048]),
    ],
)
def test_every_worker_sees_what_the_launcher_resolved(
    toy_folder: Path, tmp_path: Path, line: str, expected: list[Any]
) -> None:
    done = framework(toy_folder, tmp_path, *line.split())
    assert done.returncode == 0, done.stderr
    assert [json.loads(text) for text in done.stdout.splitlines()] == [expected, expected]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--cake-toy-depth 5", "--cake-toy-depth needs op 'toy', which --toy-backend cake selects"),
        ("--toy-backend cake --deterministic-mode --cake-toy-variant fast", "deterministic mode is on"),
        ("--toy-backend fastonly --deterministic-mode", "'fastonly' has no det variant"),
    ],
)
def test_the_launcher_refuses_before_a_worker_starts(
    toy_folder: Path, tmp_path: Path, line: str, words: str
) -> None:
    done = framework(toy_folder, tmp_path, *line.split())
    assert done.returncode != 0
    assert words in done.stderr
    assert done.stdout == ""


def test_sources_say_where_each_function_comes_from(op: Any) -> None:
    functions = hooks.SOURCES[op.name]
    assert functions
    for name, target in functions.items():
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), name


def test_sources_are_not_the_registrys_own(toy: Any) -> None:
    hooks.SOURCES["toy"].clear()
    assert hooks.SOURCES["toy"] == {"twice": "cake.toy.api:twice"}
    with pytest.raises(AttributeError, match="colours"):
        hooks.colours  # noqa: B018 - reading the attribute is the test


def test_release_asks_what_is_imported_and_only_that(monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    asked: list[str] = []
    for name, result in (("workspace", 12), ("tables", None), ("loader", None), ("_prebuild", None)):
        module = ModuleType(name)
        module.release = lambda name=name, result=result: asked.append(name) or result  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"cake.core.{name}", module)
    config.configure(op.args())
    assert hooks.release() == 12
    assert asked == ["workspace", "tables", "loader", "_prebuild"]
    assert config.variant(op.name) == "fast"  # the configuration is not memory
    for name in ("workspace", "tables", "loader", "_prebuild"):
        monkeypatch.delitem(sys.modules, f"cake.core.{name}")
    assert hooks.release() == 0


def test_release_works_on_the_real_modules() -> None:
    workspace = pytest.importorskip("cake.core.workspace")
    importlib.import_module("cake.core.loader")
    torch = pytest.importorskip("torch")
    config.configure(cake_workspace_pool_bytes="1MiB")
    workspace.take("toy", "scratch", (256,), torch.float32, torch.device("cpu"))
    first = hooks.release()
    assert first >= 0
    assert hooks.release() == 0
