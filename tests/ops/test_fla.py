"""flash-linear-attention's function through cake: a stand-in's, and the real one's where it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cake.core import fla
from cake.core.testing import assert_bitwise_equal, stand_in_fla

NAMES = ("q", "k", "v", "g", "beta")
SIGNATURE = "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False"
HANDED_BACK = "flash-linear-attention", None
PACKAGE = {"gdn": "gated_delta_rule", "kda": "kda"}  # of fla.ops


@pytest.fixture(params=["0.6.0", "0.5.2"])
def theirs(
    op: Any, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """The stand-in's function after ``import cake.<op>.fla``."""
    monkeypatch.setattr(fla, "_registered", {})
    monkeypatch.delenv("FLA_CAKE", raising=False)
    ours, function = f"cake.{op.name}.fla", op.chunk.__name__
    monkeypatch.delitem(sys.modules, ours, raising=False)
    with stand_in_fla(tmp_path, request.param, PACKAGE[op.name], function, SIGNATURE):
        importlib.import_module(ours)
        yield getattr(importlib.import_module(f"fla.ops.{PACKAGE[op.name]}"), function)
    sys.modules.pop(ours, None)


def test_a_call_runs_cakes(op: Any, theirs: Callable[..., Any], make: Any) -> None:
    case = make((70, 30), (1, 2))
    inputs = [getattr(case, name).requires_grad_() for name in NAMES]
    cu_seqlens = torch.tensor(case.boundaries, device=case.q.device)
    arguments = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens, "output_final_state": True}
    found, expected = (f(*inputs, **arguments) for f in (theirs, op.chunk))
    for name, x, y in zip(("o", "ht"), found, expected, strict=True):
        assert_bitwise_equal(name, x, y)
    grads = [torch.autograd.grad(o.float().square().sum(), inputs) for o, _ in (found, expected)]
    for name, x, y in zip(NAMES, *grads, strict=True):
        assert_bitwise_equal(f"d{name}", x, y)
    route = op.package.last_route()
    assert route is not None
    assert route.path == "single"


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 32},
        {"head_first": True},
        {"chunk_indices": torch.zeros(2, 2, dtype=torch.long)},
        {"return_intermediate_states": True},
        {"use_graph": True},
        {"max_num_seqs": 4},
        {"unknown": 1},
        {"variant": "fast"},
        {"q": "half"},
        {"v": "narrow"},
        {"beta": "half"},
        {"initial_state": "bf16"},
    ],
    ids=str,
)
def test_what_cake_does_not_serve_is_handed_back(
    theirs: Callable[..., Any], make: Any, change: dict[str, Any]
) -> None:
    case = make((64,), (1, 2), batch=1)
    given = {name: getattr(case, name) for name in NAMES} | change
    for name, how in change.items():
        x = getattr(case, name, None)
        if how == "half":
            given[name] = x.half()
        elif how == "bf16":
            given[name] = x.bfloat16()
        elif how == "narrow":
            given[name] = x[..., :64]
    assert theirs(**given) == HANDED_BACK


HONOURED = {
    "each": [
        {"scale": 0.5},
        {"state_v_first": True, "output_final_state": True},
        {"transpose_state_layout": True, "output_final_state": True},
        {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"cu_seqlens_cpu": [0, 30, 64]},
    ],
    "gdn": [
        {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.ones(2)},
        {"chunk_size": 64, "head_first": False, "chunk_indices": None},
    ],
    "kda": [
        {"use_gate_in_kernel": True, "A_log": torch.zeros(2), "dt_bias": torch.ones(256)},
        {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True, "dt_bias": torch.ones(256)},
        {"chunk_size": 64, "use_graph": False, "max_num_seqs": None},
    ],
}


@pytest.mark.parametrize(
    ("op", "honoured"),
    [(op, honoured) for op in PACKAGE for honoured in (*HONOURED["each"], *HONOURED[op])],
    indirect=["op"],
    ids=str,
)
def test_each_keyword_is_honoured(
    op: Any, theirs: Callable[..., Any], make: Any, honoured: dict[str, Any]
) -> None:
    case = make((64,), (1, 2), batch=1)
    inputs = [getattr(case, name) for name in NAMES]
    honoured = {k: x.to(case.q.device) if isinstance(x, torch.Tensor) else x for k, x in honoured.items()}
    found, expected = (f(*inputs, **honoured) for f in (theirs, op.chunk))
    plain = op.chunk(*inputs)
    for name, x, y in zip(("o", "ht"), found, expected, strict=True):
        assert_bitwise_equal(name, x, y)
    if "chunk_size" not in honoured:
        assert not all(
            x is y or (x is not None and y is not None and torch.equal(x, y))
            for x, y in zip(found, plain, strict=True)
        )


def test_tensors_that_no_kernel_can_load_are_copied(op: Any, theirs: Callable[..., Any], make: Any) -> None:
    """As a model's convolution leaves them: tokens next to each other."""
    case = make((64,), (1, 2), batch=1)
    inputs = [getattr(case, name) for name in NAMES]
    across = [x.transpose(1, -1).contiguous().transpose(1, -1) for x in inputs[:3]]
    expected, _ = op.chunk(*inputs)
    found, _ = theirs(*across, *inputs[3:])
    assert_bitwise_equal("o", found, expected)


def test_a_wrong_call_raises_cakes_error(theirs: Callable[..., Any], make: Any) -> None:
    case = make((64,), (1, 2), batch=1)
    with pytest.raises(ValueError, match=r"beta must be \[B, T, HV\]=\[1, 64, 2\], got \[1, 64, 1\]"):
        theirs(case.q, case.k, case.v, case.g, case.beta[..., :1])


def test_the_real_flash_linear_attention(op: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        fla.installed()
    except fla.FlaError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(fla, "_handed_back", set())
    importlib.import_module(f"cake.{op.name}.fla")
    real = getattr(importlib.import_module(f"fla.ops.{PACKAGE[op.name]}"), op.chunk.__name__)
    case = make((70, 30), (1, 2))
    inputs = [getattr(case, name) for name in NAMES]
    arguments = {
        "use_qk_l2norm_in_kernel": True,
        "initial_state": case.initial_state,
        "output_final_state": True,
    }
    arguments["cu_seqlens"] = torch.tensor(case.boundaries, device=case.q.device)
    for name, x, y in zip(
        ("o", "ht"), real(*inputs, **arguments), op.chunk(*inputs, **arguments), strict=True
    ):
        assert_bitwise_equal(name, x, y)
    # What is handed back is refused by flash-linear-attention itself.
    if op.name == "gdn":
        refused, reason = {"head_first": True}, "cake serves [B, T, H, D] alone, got head_first=True"
        error: type[Exception] = DeprecationWarning
    else:
        refused, reason, error = {"chunk_size": 33}, "cake serves chunk_size 64, got 33", ValueError
    with pytest.raises(error, match=next(iter(refused))):
        real(*inputs, **refused)
    assert [text for _, text in fla._handed_back] == [reason]
