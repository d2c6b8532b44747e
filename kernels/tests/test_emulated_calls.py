"""Whole calls, run by the emulator: what is recorded and played gives the bits of the stages one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cake.core.calls import Memo
from cake.core.testing import assert_bitwise_equal, poisoned_empty

LENGTHS = (70, 0, 1, 128)
BOUNDS = (0, 70, 70, 71, 199)


class Op:
    """A call of an op, its kernels run by the emulator."""

    def __init__(self, name: str, monkeypatch: Any, emulate: Any) -> None:
        self.api = __import__(f"cake.{name}.api", fromlist=["api"])
        self.autograd = __import__(f"cake.{name}._autograd", fromlist=["_autograd"])
        stages = __import__(f"cake.{name}._stages", fromlist=["_stages"])
        emulate(__import__(f"cake.{name}._cuda", fromlist=["_cuda"]))
        monkeypatch.setattr(stages, "backend_name", lambda device: "cuda")
        monkeypatch.setattr(self.api, "_calls", Memo())
        self.call = self.api.chunk_gated_delta_rule if name == "gdn" else self.api.chunk_kda
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        gate = (1, 199, 2) if name == "gdn" else (1, 199, 2, 128)
        self.inputs = {
            "q": normal(1, 199, 1, 128).bfloat16(),
            "k": normal(1, 199, 1, 128).bfloat16(),
            "v": normal(1, 199, 2, 128).bfloat16(),
            "g": -torch.nn.functional.softplus(normal(*gate)),
            "beta": normal(1, 199, 2).sigmoid(),
            "initial_state": 0.1 * normal(4, 2, 128, 128),
        }
        self.do, self.dht = normal(1, 199, 2, 128).bfloat16(), normal(4, 2, 128, 128)

    def results(self, *, final: bool = True, **arguments: Any) -> dict[str, torch.Tensor]:
        """o, the final state and all gradients of one call."""
        given = {name: x.clone().requires_grad_() for name, x in self.inputs.items()}
        arguments = {"cu_seqlens_cpu": BOUNDS, "use_qk_l2norm_in_kernel": True, **arguments}
        o, ht = self.call(**given, output_final_state=final, **arguments)
        wanted = [o, ht] if final else [o]
        grads = torch.autograd.grad(wanted, list(given.values()), [self.do, self.dht][: len(wanted)])
        return {"o": o, **({"ht": ht} if final else {}), **dict(zip(given, grads, strict=True))}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(name, got[name], x)


@pytest.fixture(params=["gdn"])
def op(request: Any, monkeypatch: Any, emulate: Any) -> Op:
    return Op(request.param, monkeypatch, emulate)


@pytest.fixture
def one_by_one(op: Op, monkeypatch: Any) -> Any:
    """Results of the stages, run as they are."""

    def results(**arguments: Any) -> dict[str, torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(op.autograd.Call, "played", property(lambda call: False))
            return op.results(**arguments)

    return results


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("segments", [1, 2])
def test_played_and_one_by_one(op: Op, one_by_one: Any, recompute: bool, segments: int) -> None:
    arguments = {"recompute_state": recompute, "segments": segments}
    expected = one_by_one(**arguments)
    with poisoned_empty():
        for _ in range(2):  # recorded, and played again
            assert_same(op.results(**arguments), expected)
