"""Registering with flash-linear-attention: old and new registries, versions, and who takes which call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cake.core import fla
from cake.core.testing import installed_distribution, stand_in_fla

SPEC = """
from cake.core.spec import OpSpec

SPEC = OpSpec("rule", "cake-rule", fla="cake.rule.fla:ADAPTER")
"""
ADAPTER = """
from cake.core import fla


def refusal(given):
    return "cake serves small ones" if given["x"] > 10 else None


def rule(x, y=0, *, chunk_size=64, variant=None):
    if y < 0:
        raise ValueError("y must be 0 or more")
    return "cake", (x, y, chunk_size)


ADAPTER = fla.Adapter("rule", "small_rule", "rule", "cake.rule.fla:rule", refusal, frozenset({"variant"}))
fla.register(ADAPTER)
"""


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "_registered", {})
    monkeypatch.setattr(fla, "_handed_back", set())
    for name in ("FLA_CAKE", "FLA_DISABLE_BACKEND_DISPATCH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def op(tmp_path: Path) -> Iterator[Path]:
    files = {"cake/rule/__init__.py": "", "cake/rule/spec.py": SPEC, "cake/rule/fla.py": ADAPTER}
    ops = {"rule": "cake.rule.spec:SPEC"}
    with installed_distribution(tmp_path / "op", "cake-rule", ops=ops, files=files) as folder:
        yield folder


def theirs() -> Any:
    from fla.ops.small_rule import rule

    return rule


REGISTRIES = [("0.6.0", "operation"), ("0.6.1", "function"), ("0.5.2", "operation"), ("0.5.0", "operation")]


@pytest.mark.parametrize(("version", "dispatched"), REGISTRIES)
def test_calls_go_to_cake_unless_they_are_handed_back(
    op: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, dispatched: str
) -> None:
    kind = {"signature": "x, y=0", "dispatched": dispatched}
    with stand_in_fla(tmp_path / "fla", version, "small_rule", "rule", **kind):
        assert fla.register_ops() == {"rule": version}
        assert fla.register_ops() == {"rule": version}  # once is enough
        rule = theirs()
        assert rule(1, 2) == rule(x=1, y=2) == ("cake", (1, 2, 64))
        assert rule(1, chunk_size=64)[0] == "cake"
        handed_back = {
            "cake serves small ones": rule(11),
            "cake doesn't know the keyword colour": rule(1, colour="red"),
            "cake doesn't know the keyword variant": rule(1, variant="fast"),
        }
        for reason, result in handed_back.items():
            assert result == ("flash-linear-attention", None)
            assert reason in caplog.text
        caplog.clear()
        rule(12)
        assert not caplog.records  # a reason is told once
        with pytest.raises(ValueError, match="y must be 0 or more"):
            rule(1, -1)  # taken, and wrong: no fallback hides it


def test_flas_own_switch_turns_it_off(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_fla(tmp_path / "fla", "0.6.0", "small_rule", "rule", "x"):
        fla.register_ops()
        monkeypatch.setenv("FLA_CAKE", "0")
        assert theirs()(1) == ("flash-linear-attention", None)


def test_positional_arguments_have_flas_order(op: Path, tmp_path: Path) -> None:
    with stand_in_fla(tmp_path / "fla", "0.5.2", "small_rule", "rule", "y, x"):
        fla.register_ops()
        assert theirs()(1, 2) == ("cake", (2, 1, 64))


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("0.4.2", {}, "cake registers with flash-linear-attention >=0.5,<0.7, got 0.4.2"),
        ("0.7.0", {}, "got 0.7.0"),
        ("0.5.0", {"dispatched": ""}, "0.5.0 doesn't ask backends for rule: use 0.5.2 or newer, or call"),
        ("0.6.0", {"dispatched": ""}, "0.6.0 doesn't ask backends for rule"),
    ],
)
def test_others_are_refused_with_the_reason(
    op: Path, tmp_path: Path, version: str, options: Mapping[str, str], message: str
) -> None:
    with (
        stand_in_fla(tmp_path / "fla", version, "small_rule", "rule", "x", **options),
        pytest.raises(fla.FlaError) as caught,
    ):
        fla.register_ops()
    assert message in str(caught.value)
    assert fla.registered() == {}


def test_a_dispatch_that_is_off_is_told(op: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    for version in ("0.6.0", "0.5.2"):
        with (
            stand_in_fla(tmp_path / version, version, "small_rule", "rule", "x"),
            pytest.raises(fla.FlaError, match="FLA_DISABLE_BACKEND_DISPATCH=1"),
        ):
            fla.register_ops()


def test_an_fla_that_breaks_on_import_is_no_mystery(op: Path, tmp_path: Path) -> None:
    files = {"fla/__init__.py": "raise ValueError('key contains names that are not kernel arguments')"}
    with (
        installed_distribution(tmp_path / "fla", "fla-core", version="0.5.2", files=files),
        pytest.raises(fla.FlaError, match=r"0.5.2 can't be imported: ValueError: key contains names"),
    ):
        fla.register_ops()


PROGRAM = """
import sys
from fla.ops.small_rule import rule
print(rule(1, 2)[0], sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("start", ["module", "script", "environment", "nothing"])
def test_programs_start_with_it(op: Path, tmp_path: Path, start: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(("import cake.core\n" if start == "environment" else "") + PROGRAM)
    path = os.pathsep.join(map(str, (op, tmp_path / "fla", tmp_path, os.environ.get("PYTHONPATH", ""))))
    words = {
        "module": ["-m", "cake.core.fla", "-m", "program"],
        "script": ["-m", "cake.core.fla", str(script)],
    }
    with stand_in_fla(tmp_path / "fla", "0.6.0", "small_rule", "rule", "x, y=0"):
        done = subprocess.run(
            [sys.executable, *words.get(start, [str(script)]), "a", "b"],
            env={**os.environ, "PYTHONPATH": path, "CAKE_FLA": "1" if start == "environment" else ""},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    expected = "flash-linear-attention" if start == "nothing" else "cake"
    assert done.stdout.splitlines() == [f"{expected} ['a', 'b'] __main__"]


def test_the_launcher_says_how_it_is_used() -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m cake.core.fla"):
        fla.main([])
