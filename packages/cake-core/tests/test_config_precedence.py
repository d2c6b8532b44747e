"""Call argument, configure(), environment, default: which one wins, and that doctor prints it."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cake.core import cli, config, env
from cake.core.errors import ConfigError
from cake.core.settings import SETTINGS

# name -> (variable, in the environment, parsed, configured, call argument)
CASES = {
    "cache_dir": ("CAKE_CACHE_DIR", "/env", "/env", "/configured", "/call"),
    "cache_readonly_dirs": ("CAKE_CACHE_READONLY_DIRS", "/a:/b", "/a:/b", "/configured", "/call"),
    "cuda_arch_list": ("CAKE_CUDA_ARCH_LIST", "9.0a;10.0a", "9.0a;10.0a", "9.0a", "sm_90a"),
    "nvcc": ("CAKE_NVCC", "/env/nvcc", "/env/nvcc", "/configured/nvcc", "/call/nvcc"),
    "jobs": ("CAKE_JOBS", "3", 3, 4, 5),
    "disable_jit": ("CAKE_DISABLE_JIT", "1", True, False, True),
    "log": ("CAKE_LOG", "debug", "debug", "error", "info"),
    "fla": ("CAKE_FLA", "1", True, False, True),
}


def test_every_setting_with_a_variable_is_covered() -> None:
    assert set(CASES) == {name for name, setting in SETTINGS.items() if setting.variables}


@pytest.mark.parametrize("name", CASES)
def test_precedence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, text, parsed, configured, given = CASES[name]
    default = SETTINGS[name].default
    assert config.setting(name) == config.Setting(default, "default")
    monkeypatch.setenv(variable, text)
    assert config.setting(name) == config.Setting(parsed, f"environment {variable}")
    config.configure({f"cake_{name}": configured})
    assert config.setting(name) == config.Setting(configured, "configure()")
    assert config.setting(name, given) == config.Setting(given, "call argument")
    assert config.setting(name, None).source == "configure()"
    monkeypatch.delenv(variable)
    assert config.setting(name).source == "configure()"
    config.reset()
    assert config.setting(name) == config.Setting(default, "default")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_value_counts_as_unset(name: str, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CASES[name][0], empty)
    assert config.setting(name).source == "default"
    config.configure({f"cake_{name}": empty})
    assert config.setting(name).source == "default"
    assert config.setting(name, empty).source == "default"


def test_cake_jobs_then_max_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert config.setting("jobs") == config.Setting(7, "environment MAX_JOBS")
    monkeypatch.setenv("CAKE_JOBS", "3")
    assert config.setting("jobs") == config.Setting(3, "environment CAKE_JOBS")
    monkeypatch.setenv("CAKE_JOBS", "")
    assert config.setting("jobs").value == 7


@pytest.mark.parametrize(
    ("variable", "value", "name", "words"),
    [
        ("CAKE_JOBS", "many", "jobs", ["CAKE_JOBS", "whole number", "'many'"]),
        ("CAKE_JOBS", "0", "jobs", ["CAKE_JOBS", "at least 1", "'0'"]),
        ("MAX_JOBS", "-2", "jobs", ["MAX_JOBS", "at least 1", "'-2'"]),
        ("CAKE_DISABLE_JIT", "maybe", "disable_jit", ["CAKE_DISABLE_JIT", "true or false", "'maybe'"]),
        ("CAKE_LOG", "loud", "log", ["CAKE_LOG", "debug", "'loud'"]),
        ("CAKE_FLA", "perhaps", "fla", ["CAKE_FLA", "true or false", "'perhaps'"]),
    ],
)
def test_a_malformed_variable_is_named_and_harms_nothing_that_wins_over_it(
    variable: str, value: str, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        config.setting(name)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match=variable):
        config.configure()
    row = next(row for row in config.resolved() if row.name == name)
    assert row.error is not None
    assert variable in row.error
    config.configure({f"cake_{name}": CASES[name][3]})
    assert config.setting(name).source == "configure()"


def test_an_unknown_setting_lists_those_there_are() -> None:
    with pytest.raises(LookupError, match=r"'colour'.*cache_dir.*workspace_pool_bytes"):
        config.setting("colour")


@pytest.mark.parametrize("value", ["1", "true", "Yes", "ON"])
def test_fla_is_refused_where_it_is_not_installed(
    value: str, monkeypatch: pytest.MonkeyPatch, toy: Any
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setenv("CAKE_FLA", value)
    words = r"fla is on \(environment CAKE_FLA\): flash-linear-attention isn't installed"
    with pytest.raises(ConfigError, match=words):
        config.configure(toy.args())
    assert not config.configured()
    config.configure(toy.args(cake_fla=False))
    assert config.variant("toy") == "fast"
    with pytest.raises(ConfigError, match=r"fla is on \(configure\(\)\)"):
        config.configure(cake_fla=True)


def test_doctor_prints_which_one_won(
    op: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("CAKE_JOBS", "3")
    monkeypatch.setenv("MAX_JOBS", "9")
    config.configure(op.args(recompute_state=True, cake_cache_dir=tmp_path / "conf"))
    cli.main(["doctor"])
    words = {
        line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line
    }
    assert words["cache_dir"] == f"{tmp_path / 'conf'} (configure())"
    assert words["CAKE_CACHE_DIR"] == f"{tmp_path / 'env'} (not used: configure() wins)"
    assert words["jobs"] == "3 (environment CAKE_JOBS)"
    assert words["CAKE_JOBS"] == "3"
    assert words["MAX_JOBS"] == "9 (not used: CAKE_JOBS wins)"
    assert words["log"] == "warning (default)"
    assert words[f"{op.name}.variant"] == "fast (default of a selected op)"
    assert words[f"{op.name}.recompute_state"] == "True (configure())"
    assert words["deterministic"] == "False (configure())"


def test_the_table_of_variables_is_what_the_settings_read() -> None:
    known = {variable.name for variable in env.VARIABLES}
    assert {v for setting in SETTINGS.values() for v in setting.variables} <= known
    with pytest.raises(LookupError, match="CAKE_COLOUR"):
        env.get("CAKE_COLOUR")


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKE_NVCC", " /opt/with space/nvcc ")
    assert env.get("CAKE_NVCC") == "/opt/with space/nvcc"
    monkeypatch.setenv("CAKE_NVCC", "  ")
    assert env.get("CAKE_NVCC") is None
    assert env.get("CAKE_NVCC", "else") == "else"
    assert "CAKE_NVCC" in os.environ
