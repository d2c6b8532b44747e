"""tools/fla_tests.py, as far as it goes without flash-linear-attention and a GPU."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fla_tests", ROOT / "tools" / "fla_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("report", "refused", "expected"),
    [
        (("passed", ""), [], ("passed", "")),
        (("failed", "assert 1 == 2"), [], ("failed", "assert 1 == 2")),
        (("skipped", "refused: why"), ["why"], ("refused", "why")),
        # What the test made of the refusal is no matter.
        (("failed", "Skipped was caught"), ["why", "other"], ("refused", "why")),
        (("skipped", "not on this GPU"), [], ("skipped", "not on this GPU")),
    ],
)
def test_what_a_test_counts_as(
    script: ModuleType, report: tuple[str, str], refused: list[str], expected: tuple[str, str]
) -> None:
    kind, why = report
    assert script.outcome({"outcome": kind, "why": why}, {"served": 1, "refused": refused}) == expected


def test_counts_reasons_and_failures(script: ModuleType) -> None:
    def test(name: str, outcome: str, reason: str = "") -> dict[str, str]:
        return {"name": name, "outcome": outcome, "reason": reason}

    tests = [
        test("test_gdn.py::a", "passed"),
        test("test_gdn.py::b", "refused", "float16"),
        test("test_gdn.py::c", "refused", "float16"),
        test("test_gdn.py::d", "failed", "too far off"),
        test("test_kda.py::a", "skipped"),
    ]
    found = script.counted(tests, "test_gdn.py")
    assert {key: found[key] for key in ("tests", *script.OUTCOMES)} == {
        "tests": 4,
        "passed": 1,
        "refused": 2,
        "failed": 1,
        "skipped": 0,
    }
    assert found["reasons"] == {"float16": 2}
    assert found["failures"] == {"test_gdn.py::d": {"why": "too far off"}}
    assert script.counted(tests, "test_kda.py")["skipped"] == 1


def test_sources_are_a_checkout_or_its_archive(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "flash" / "tests" / "ops"
    folder.mkdir(parents=True)
    (folder / "test_gdn.py").write_text("")
    with script.sources(str(tmp_path / "flash")) as found:
        assert found == folder
    archive = tmp_path / "flash.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "flash", "flash")
    with script.sources(str(archive)) as found:
        assert (found / "test_gdn.py").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit, match=r"holds no tests/ops/test_gdn\.py"), script.sources(str(empty)):
        pass


def test_a_run_counts_and_replaces(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of a run, with a stand-in for flash-linear-attention that asks its backend and falls back."""
    site = tmp_path / "site"
    (site / "fla" / "ops" / "kda").mkdir(parents=True)
    (site / "fla" / "ops" / "gated_delta_rule").mkdir(parents=True)
    (site / "fla" / "__init__.py").write_text("")
    (site / "fla" / "ops" / "__init__.py").write_text("")
    (site / "fla" / "ops" / "kda" / "__init__.py").write_text(DISPATCH.replace("NAME", "chunk_kda"))
    text = DISPATCH.replace("NAME", "chunk_gated_delta_rule")
    (site / "fla" / "ops" / "gated_delta_rule" / "__init__.py").write_text(text)
    (site / "fla" / "backends.py").write_text(BACKENDS)
    for name in ("fla_core", "flash_linear_attention"):
        info = site / f"{name}-0.6.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.6.0\n")
    ops = tmp_path / "ops"
    ops.mkdir()
    (ops / "test_gdn.py").write_text(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    *_, ran = script.run(ops, {}, [])
    as_written = ran["gdn"]
    assert (as_written["tests"], as_written["refused"], as_written["failed"]) == (3, 2, 1)
    assert as_written["reasons"] == {"cake serves bfloat16, got q of torch.float16": 2}
    (failure,) = as_written["failures"].values()
    assert "on purpose" in failure["why"]
    assert failure["without cake"] == "failed KeyError: 'chunk_gated_delta_rule'"
    *_, ran = script.run(ops, script.RUNS["bfloat16 for float16"], [])
    replaced = ran["gdn"]
    assert (replaced["passed"], replaced["refused"], replaced["failed"]) == (2, 0, 1)
    assert json.loads(json.dumps(replaced)) == replaced
    assert "bfloat16 for float16" in script.table({"bfloat16 for float16": {"gdn": replaced}})


BACKENDS = """
registries = {}


class BaseBackend:
    pass


def register(target):
    def add(backend):
        registries[target if isinstance(target, str) else target.__name__] = backend()
        return backend

    return add
"""

DISPATCH = """
import fla.backends


def NAME(q, k, v, g, beta, **more):
    backend = fla.backends.registries["NAME"]
    if getattr(backend, "NAME_verifier")(q, k, v, g, beta, **more)[0]:
        return getattr(backend, "NAME")(q, k, v, g, beta, **more)
    raise AssertionError("the real one would run here")
"""

TESTS = """
import pytest
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


def inputs(dtype):
    q, k, v = (torch.randn(1, 70, 1, 128).to(dtype) for _ in range(3))
    return q, k, v, -torch.rand(1, 70, 1), torch.rand(1, 70, 1)


@pytest.mark.parametrize("state", [False, True])
def test_served(state):
    o, end = chunk_gated_delta_rule(*inputs(torch.float16), output_final_state=state)
    assert o.dtype == torch.float16
    assert (end is None) != state


def test_fails():
    chunk_gated_delta_rule(*inputs(torch.bfloat16))
    raise ValueError("on purpose")


def test_that_does_not_call():
    raise ValueError("it is left out")
"""
