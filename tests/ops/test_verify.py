"""``cake verify``: every op passes, and kernels that are wrong in one way each do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cake.core.cli import main
from cake.core.verify import Runner, Verify

CASE = "views of a projection"


def test_the_op_passes_on_this_machine(
    verify: Verify, op: Any, device: torch.device, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "verify.json"
    assert main(["verify", op.name, "--device", str(device), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["passed"]
    assert {outcome["case"] for outcome in found["outcomes"]} == {case.name for case in verify.cases}
    assert found["header"]["kernels"][op.name].startswith("sha256:")
    gates = {outcome["gate"] for outcome in found["outcomes"]}
    expected = {"accuracy", "5 calls alike", "saved as recomputed", "another thread", "documents alone"}
    expected |= {"saved as all saved"} if "all" in op.own.TAPES else set()
    assert gates == expected | ({"another stream"} if device.type == "cuda" else set())
    assert f"{len(found['outcomes'])} of {len(found['outcomes'])} gates passed" in capsys.readouterr().out


@pytest.fixture
def verify(op: Any) -> Verify:
    found: Verify = op.module("verify").VERIFY
    return found


def nth(results: Any, n: int, change: Callable[[torch.Tensor], Any]) -> Any:
    change(results[n])
    return results


def in_a_thread() -> bool:
    # A backward runs in the thread that calls it, on a CPU.
    return threading.current_thread() is not threading.main_thread()


def one_bit(x: torch.Tensor) -> torch.Tensor:
    """Changes one element of x by the least that can be."""
    where = x.flatten()[0:1]
    bits = where.view(torch.int16 if x.element_size() == 2 else torch.int32)
    bits.add_(1)
    return x


calls = 0


def every_third(results: Any) -> Any:
    global calls
    calls += 1
    return nth(results, 2, one_bit) if calls % 3 == 0 else results


#: What is wrong: stage, what becomes of its results and keywords, and the gate that has to notice.
DOCTORED: dict[str, tuple[str, Callable[[Any, dict[str, Any]], Any], str]] = {
    "dk is 2 % too large": ("out", lambda r, k: nth(r, 1, lambda x: x.mul_(1.02)), "accuracy"),
    "dg of the last tokens is lost": ("out", lambda r, k: nth(r, 4, lambda x: x[:, -5:].zero_()), "accuracy"),
    "eight columns of o are those beside": (
        "scan",
        lambda r, k: nth(r, 0, lambda x: x[..., 8:16].copy_(x[..., 16:24])),
        "accuracy",
    ),
    "one row of an adjoint tile is off": (
        "adj",
        lambda r, k: nth(r, 0, lambda x: x[:, 63].mul_(1.5)),
        "accuracy",
    ),
    "o is not a number in one place": (
        "scan",
        lambda r, k: nth(r, 0, lambda x: x[:, 7, :, 3].fill_(float("nan"))),
        "accuracy",
    ),
    "dv changes from call to call": ("out", lambda r, k: every_third(r), "5 calls alike"),
    "the walk again differs": (
        "scan",
        lambda r, k: nth(r, 2, lambda x: x.mul_(1.01)) if k.get("need_output") is False else r,
        "saved as recomputed",
    ),
    "other threads differ": (
        "out",
        lambda r, k: nth(r, 0, one_bit) if in_a_thread() else r,
        "another thread",
    ),
    "neighbours count": (
        "out",
        lambda r, k: nth(r, 0, one_bit) if r[0].shape[1] > 130 else r,
        "documents alone",
    ),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_a_doctored_kernel_is_caught(
    verify: Verify, op: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, change, gate = DOCTORED[what]
    kernels = op.module("_torch")
    original = getattr(kernels, stage)

    def doctored(*arguments: Any, **keywords: Any) -> Any:
        return change(original(*arguments, **keywords), keywords)

    monkeypatch.setattr(kernels, stage, doctored)
    case = verify.case("slow decay" if "dg" in what else CASE)
    runner = Runner(verify, ("det",), torch.device("cpu"), cases=(case,))
    outcomes = {outcome.gate: outcome for outcome in runner.run()}
    assert not outcomes[gate].passed
    assert outcomes[gate].message
    if gate != "accuracy":
        assert outcomes["accuracy"].passed
    if gate not in ("accuracy", "5 calls alike"):
        assert [name for name, outcome in outcomes.items() if not outcome.passed] == [gate]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "what", ["dk is 2 % too large", "eight columns of o are those beside", "dv changes from call to call"]
)
def test_a_doctored_kernel_is_caught_on_a_gpu(
    verify: Verify, op: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, change, gate = DOCTORED[what]
    kernels = op.module("_cuda")
    original = getattr(kernels, stage)

    def doctored(*arguments: Any, **keywords: Any) -> Any:
        return change(original(*arguments, **keywords), keywords)

    # Doctored results are tensors, so the stages run one by one.
    monkeypatch.setattr(op.module("_autograd").Call, "played", property(lambda call: False))
    monkeypatch.setattr(kernels, stage, doctored)
    runner = Runner(verify, ("det",), torch.device("cuda", 0), cases=(verify.case(CASE),))
    assert not {outcome.gate: outcome for outcome in runner.run()}[gate].passed


def test_a_kernel_that_raises_fails_its_gates(op: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(op.module("_torch"), "adj", broken)
    assert main(["verify", op.name, "--device", "cpu", "--cases", CASE, "--variants", "det"]) == 1
    assert "RuntimeError: an illegal memory access" in capsys.readouterr().out
