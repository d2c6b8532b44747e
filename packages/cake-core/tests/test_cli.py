"""The command's frame: help, usage errors, exit statuses, and only the module that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cake.core import cli, registry
from cake.core.errors import ConfigError
from cake.core.testing import installed_distribution

NAMES = [name for name, _, _ in cli.COMMANDS]


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, _, help in cli.COMMANDS:
        assert name in text
        assert help.split()[0] in text
    code = "import sys\nfrom cake.core.cli import main\ntry: main(['-h'])\nexcept SystemExit: pass\n"
    code += "assert not [m for m in sys.modules if m.startswith('cake.core.cli.')]\n"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_its_module_and_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"cake.core.cli.{next(m for n, m, _ in cli.COMMANDS if n == name)}")
    assert callable(module.add_parser)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"cake {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cake-core {version('cake-core')}\n"


@pytest.mark.parametrize("words", [[], ["bake"], ["ops", "--colour"], ["ops", "extra"]])
def test_wrong_usage_exits_with_2_and_says_why(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "cake" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a command called ``try`` into the table that runs a given function."""

    def install(run: Any) -> None:
        module = ModuleType("cake.core.cli._try")
        module.add_parser = lambda subparsers: subparsers.add_parser("try")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cake.core.cli._try", module)
        monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, ("try", "_try", "a command of the tests")))

    return install


@pytest.mark.parametrize(("result", "status"), [(0, 0), (1, 1), (False, 0), (True, 1)])
def test_the_status_is_the_commands(command: Any, result: Any, status: int) -> None:
    command(lambda args: result)
    assert cli.main(["try"]) == status


@pytest.mark.parametrize("error", [ConfigError("no luck"), NotImplementedError("no luck")])
def test_an_error_of_cakes_own_is_one_line_and_status_1(
    command: Any, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: Any) -> int:
        raise error

    command(run)
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == "cake: error: no luck\n"


def test_any_other_error_keeps_its_traceback(command: Any) -> None:
    def run(args: Any) -> int:
        raise ZeroDivisionError

    command(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_an_interrupt_is_quiet(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: Any) -> int:
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = (
        "import sys\n"
        "from cake.core import cli\n"
        "module = type(sys)('cake.core.cli._try')\n"
        "module.add_parser = lambda subparsers: subparsers.add_parser('try')\n"
        "module.run = lambda args: print('x' * 10_000_000) or 0\n"
        "sys.modules['cake.core.cli._try'] = module\n"
        "cli.COMMANDS = (('try', '_try', ''),)\n"
        "sys.exit(cli.main(['try']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cake.core", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cake-core {version('cake-core')}\n"


# ---- cake ops


def test_ops_lists_what_is_installed(
    op: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["ops"]) == 0
    text = capsys.readouterr().out
    spec = registry.op_spec(op.name)
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [op.name])
    assert f"{op.name}: {spec.summary}" in text
    assert version(spec.distribution) in line
    assert "det, fast" in line
    assert f"--{op.option.replace('_', '-')} cake" in line
    assert cli.main(["ops", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)["ops"]}
    assert rows[op.name]["variants"] == ["det", "fast"]
    assert f"--cake-{op.name}-recompute-state" in rows[op.name]["flags"]


def test_ops_names_a_broken_declaration_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"cake_bad.py": "raise RuntimeError('no luck')"}
    with installed_distribution(tmp_path, "cake-bad", ops={"bad": "cake_bad:SPEC"}, files=files):
        assert cli.main(["ops"]) == 1
        assert "bad: its declaration can't be used: RuntimeError: no luck" in capsys.readouterr().out
        assert cli.main(["ops", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["broken"] == {"bad": "no luck"}


def test_ops_without_any_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ops", lambda: ())
    assert cli.main(["ops"]) == 0
    assert "pip install cake-gdn" in capsys.readouterr().out
