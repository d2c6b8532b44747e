"""tools/gpu_tests.py, as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tools" / "gpu_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_pytest(script: ModuleType, folder: Path, source: str) -> dict[str, object]:
    test = folder / "test_it.py"
    test.write_text(source)
    words = ["-c", os.devnull, "--rootdir", str(folder), str(test)]
    result: dict[str, object] = script.pytest(dict(os.environ), folder, words)
    return result


def test_counts_what_passed_and_names_what_failed(script: ModuleType, tmp_path: Path) -> None:
    source = (
        "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\n@pytest.mark.gpu\ndef test_bad(): assert 0\n"
    )
    result = run_pytest(script, tmp_path, source)
    assert (result["exit"], result["tests"], result["failures"]) == (1, 2, 1)
    assert result["failed"] == ["test_it::test_bad"]
    assert "test_bad" in (tmp_path / "pytest.log").read_text()


@pytest.mark.parametrize(
    "source",
    [
        "def test_unmarked(): pass\n",
        "import pytest\n@pytest.mark.gpu\ndef test_skipped(): pytest.skip('no GPU')\n",
    ],
    ids=["none", "skipped"],
)
def test_a_run_without_a_test_is_a_failure(script: ModuleType, tmp_path: Path, source: str) -> None:
    assert run_pytest(script, tmp_path, source)["exit"] != 0


def test_an_empty_folder_of_wheels_is_named(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no wheel"):
        script.unpack(tmp_path, tmp_path / "site")


def test_a_machine_without_a_gpu_is_refused(script: ModuleType) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        script.describe(hidden)


def test_the_sanitizers_words_decide(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for compute-sanitizer: its exit status counts, and a run without a summary does not pass."""
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "sanitizer_case.py").write_text("")
    tool = tmp_path / "compute-sanitizer"
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", environment["PATH"])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    for body, expected in (
        ("echo '========= ERROR SUMMARY: 0 errors'", 0),
        ("echo '========= ERROR SUMMARY: 3 errors'; exit 9", 9),
        ("true", 1),
    ):
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        result = script.sanitize(environment, tmp_path, "memcheck")
        assert result["exit"] == expected, body
    assert sys.executable in result["command"]
