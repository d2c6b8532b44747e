"""``cake verify`` on a throw-away op, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cake.core.cli import main
from cake.core.testing import installed_distribution
from cake.core.verify import Given
from cake.core.verify._runner import _late

SPEC = """
from cake.core.spec import OpSpec

SPEC = OpSpec("proved", "cake-proved", verify="cake.proved.verify:VERIFY")
SILENT = OpSpec("silent", "cake-proved")
"""

VERIFY = """
import os
import threading
import torch

from cake.core.verify import Case, Given, Verify


def make(device, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 100, 4, generator=random).to(device).requires_grad_()
    w = torch.randn(4, generator=random).to(device).requires_grad_()
    loss = {"y": torch.randn(1, 100, 4, generator=random).to(device)}
    return Given({"x": x, "w": w}, loss, boundaries=(0, 30, 100))


def call(given, variant, tape):
    wrong = os.environ.get("PROVED_WRONG", "")
    y = given.tensors["x"] * given.tensors["w"]
    if wrong == "raises":
        raise RuntimeError("no such kernel")
    main_thread = threading.current_thread() is threading.main_thread()
    if wrong in (variant, tape, "thread" if not main_thread else None):
        y = y * (1 + 1e-3)
    if wrong == "neighbours" and y.shape[1] == 100:
        y = y + 1e-9
    if wrong == "extra":
        return {"y": y, "z": y.sum()}
    return {"y": y}


def reference(given):
    x, w, dy = (t.detach().double() for t in (*given.tensors.values(), *given.loss.values()))
    return {"y": x * w, "dx": dy * w, "dw": (dy * x).sum((0, 1))}


VERIFY = Verify(
    "proved",
    (Case("small", make, bits=True), Case("smaller", make, limits={"y": 1e-2})),
    call,
    reference,
    limits={"y": 1e-4, "dx": 1e-4, "dw": 1e-4},
    whole=("dw",),
    tapes=("saved", "recomputed"),
)
"""


@pytest.fixture
def proved(tmp_path: Path) -> Any:
    files = {"cake/proved/__init__.py": "", "cake/proved/spec.py": SPEC, "cake/proved/verify.py": VERIFY}
    ops = {"proved": "cake.proved.spec:SPEC", "silent": "cake.proved.spec:SILENT"}
    with installed_distribution(tmp_path / "site", "cake-proved", ops=ops, files=files):
        yield tmp_path


def verify(*words: str) -> int:
    return main(["verify", "proved", "--device", "cpu", *words])


def failed(path: Path) -> list[tuple[str, str, str]]:
    found = json.loads(path.read_text())
    wrong = [(o["case"], o["gate"], o["variant"]) for o in found["outcomes"] if not o["passed"]]
    assert found["passed"] == (not wrong)
    return wrong


def test_a_right_op_passes(proved: Path, capsys: Any) -> None:
    out = proved / "out.json"
    assert verify("--out", str(out)) == 0
    assert failed(out) == []
    found = json.loads(out.read_text())
    gates = [(o["case"], o["gate"], o["variant"]) for o in found["outcomes"]]
    bits = ("5 calls alike", "saved as recomputed", "another thread", "documents alone")
    assert gates == [
        ("small", "accuracy", "det"),
        ("small", "accuracy", "fast"),
        *(("small", gate, "det") for gate in bits),
        ("smaller", "accuracy", "det"),
        ("smaller", "accuracy", "fast"),
    ]
    assert found["header"]["versions"]["cake-proved"] == "1.0"
    assert found["outcomes"][0]["limits"] == {"y": 1e-4, "dx": 1e-4, "dw": 1e-4}
    assert found["outcomes"][0]["errors"]["y"] < 1e-6
    printed = capsys.readouterr().out
    for word in ("the reference backend", "cake-proved 1.0", "of 1.0e-04", "8 of 8 gates passed"):
        assert word in printed


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("fast", [("small", "accuracy", "fast"), ("smaller", "accuracy", "fast")]),
        ("recomputed", [("small", "saved as recomputed", "det")]),
        ("thread", [("small", "another thread", "det")]),
        ("neighbours", [("small", "documents alone", "det")]),
    ],
)
def test_each_gate_finds_what_it_is_for(
    proved: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, expected: list[tuple[str, str, str]]
) -> None:
    monkeypatch.setenv("PROVED_WRONG", wrong)
    assert verify("--out", str(proved / "out.json")) == 1
    assert failed(proved / "out.json") == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("raises", "RuntimeError: no such kernel"), ("extra", "actual must hold ['dw', 'dx', 'y']")],
)
def test_an_op_that_breaks_fails_every_gate(
    proved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, wrong: str, message: str
) -> None:
    monkeypatch.setenv("PROVED_WRONG", wrong)
    assert verify("--cases", "small", "--variants", "fast") == 1
    assert message in capsys.readouterr().out


def test_the_cases_are_listed(proved: Path, capsys: Any) -> None:
    assert verify("--list") == 0
    assert capsys.readouterr().out == "proved: small (bits too)\nproved: smaller\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cases", "large"), "cases of 'proved' are 'small', 'smaller', got 'large'"),
        (("--variants", "quick"), "--variants must be of det, fast, got 'quick'"),
        (("--device", "meta"), "--device must be a CPU or a CUDA GPU, got 'meta'"),
        (("--device", "gpu"), "--device must be a CPU or a CUDA GPU, got 'gpu'"),
        (("--out", "."), "--out must be a file, got the folder ."),
    ],
)
def test_wrong_usage(proved: Path, capsys: Any, words: tuple[str, ...], message: str) -> None:
    assert verify(*words) == 2
    assert message in capsys.readouterr().err


def test_an_op_without_a_part_of_its_own_is_named(proved: Path, capsys: Any) -> None:
    assert main(["verify", "silent"]) == 1
    assert "op 'silent' declares nothing to verify" in capsys.readouterr().err


def test_late_tensors_are_the_same_call() -> None:
    x, w = torch.randn(1, 4, 2, requires_grad=True), torch.randn(2)
    given = Given({"x": x, "w": w}, {"y": torch.ones(1, 4, 2)}, {"flag": True}, (0, 4))
    late = _late(given, torch.empty(3))
    assert torch.equal(late.tensors["x"], x)
    assert torch.equal(late.loss["y"], given.loss["y"])
    assert (late.tensors["x"].requires_grad, late.tensors["w"].requires_grad) == (True, False)
    assert late.tensors["x"].is_leaf
    assert (late.arguments, late.boundaries) == (given.arguments, given.boundaries)
    assert late.tensors["x"].data_ptr() != x.data_ptr()
