"""What a call's metadata decided is found again for equal metadata, and for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cake.core import config
from cake.core.calls import Memo, Planned, differentiated_once, key_of, layouts, near_key_of
from cake.core.segments import Segments, cut_unseen
from cake.core.sequences import Sequences, packed, packed_on_device


def test_equal_metadata_is_equal():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    assert layouts((x, None)) == layouts((y, None))
    assert hash(layouts([x])) == hash(layouts([y]))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).T,
        torch.zeros(2, 3).bfloat16(),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3, requires_grad=True),
        None,
    ],
    ids=["shape", "strides", "dtype", "device", "gradient", "none"],
)
def test_any_difference_tells(other):
    assert layouts([torch.zeros(2, 3)]) != layouts([other])


def test_what_is_no_tensor_has_no_layout():
    assert layouts([torch.zeros(2), [1.0]]) is None


def key(x, cu_seqlens=None, cu_seqlens_cpu=None, settings=(1.0,)):
    return key_of((x, None), cu_seqlens, cu_seqlens_cpu, settings)


class Other(torch.Tensor):
    """A tensor that may have no memory of its own, as a distributed one."""


def under_torchs_deterministic_modes(made):
    """What is made under the mode that raises, and under the one that warns: fast is refused in one alone."""
    try:
        torch.use_deterministic_algorithms(True)
        found = [made()]
        torch.use_deterministic_algorithms(True, warn_only=True)
        return [*found, made()]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_key_holds_all_that_decides(op):
    x, cpu = torch.zeros(1, 4), torch.tensor([0, 1, 4])
    assert key(x, cpu) == key(torch.ones(1, 4), torch.tensor([0, 1, 4]))
    assert key(x, None, [0, 1, 4]) == key(x, None, cpu)
    keys = [key(x), key(x, None, cpu), key(x, None, [0, 2, 4]), key(x, settings=(2.0,)), key(x.double())]
    with config.temporary(op.args()):
        keys.append(key(x))
    with torch.no_grad():
        keys.append(key(x))
    keys += under_torchs_deterministic_modes(lambda: key(x))
    keys.append(key(Other(x)))
    assert len(set(keys)) == len(keys)
    assert key([1.0]) is None


@dataclass(frozen=True)
class Call(Planned):
    seqs: Sequences
    segments: Segments | None
    scale: float = 1.0


def test_a_planned_call_takes_the_boundaries_of_the_present_one():
    cu = torch.tensor([0, 600, 1200])
    seqs = packed_on_device(cu, 1200)
    call = Call(seqs, cut_unseen(seqs, 8), 2.0)
    moved = call.at(cu.clone())
    for part in (moved.seqs, moved.segments, moved.segments.whole):
        assert part.cu_device is not cu
        assert torch.equal(part.cu_device, cu)
    assert (moved.scale, moved.segments.n) == (call.scale, call.segments.n)
    assert call.at(None).segments.whole.cu_device is None
    host = Call(packed((0, 600, 1200), 1200), None)
    assert host.at(cu) is host


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["sum", "squares"])
def test_gradients_of_gradients_are_refused(loss):
    """Also where the gradient that comes in is a constant, and only what was saved has a graph."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, nothing):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @differentiated_once
        def backward(ctx, dy):
            return 2 * ctx.saved_tensors[0] * dy, None

    x = torch.arange(3.0, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x.square()), x)
    (dx,) = torch.autograd.grad(loss(Square.apply(x, None)), x, create_graph=True)
    assert torch.equal(dx, expected)
    penalised = x.sum() + dx.square().sum()
    with pytest.raises(RuntimeError, match="gradients of gradients aren't served"):
        penalised.backward()
    (dx,) = torch.autograd.grad(loss(Square.apply(x, None)), x)
    assert not dx.requires_grad


def test_a_memo_keeps_and_forgets():
    memo: Memo[int] = Memo(most=2)
    assert memo.get("a") is None
    assert memo.keep("a", 1) == 1
    memo.keep("b", 2)
    assert (memo.get("a"), memo.get("b")) == (1, 2)
    memo.keep("c", 3)
    assert memo.get("c") == 3
    assert memo.get("a") is None


def test_a_memo_passes_over_what_can_be_no_key():
    memo: Memo[int] = Memo()
    assert memo.keep([1], 1) == 1
    assert memo.get([1]) is None


def near(x, other=None, cu_seqlens=None, cu_seqlens_cpu=None, settings=(1.0,)):
    return near_key_of((x, x, x, other), cu_seqlens, cu_seqlens_cpu, settings)


def test_a_near_key_leaves_out_what_recordings_see(op):
    x, cpu = torch.zeros(1, 4), torch.tensor([0, 1, 4])
    assert near(x) == near(torch.zeros(4, 1, dtype=torch.float64).T)
    keys = [near(x), near(x, x), near(x, cu_seqlens_cpu=cpu), near(x, settings=(2.0,)), near(x[:, :2])]
    keys += [near(x.to("meta")), near(torch.zeros(1, 4, requires_grad=True))]
    keys.append(near(x, cu_seqlens=cpu.to("meta")))
    with torch.no_grad():
        keys.append(near(x))
    with config.temporary(op.args()):
        keys.append(near(x))
    keys += under_torchs_deterministic_modes(lambda: near(x))
    keys += [near(Other(x)), near(x, Other(x))]
    assert len({*keys}) == len(keys)
    assert near(x, [1.0]) is None
    assert near(x, cu_seqlens=cpu.to("meta"), cu_seqlens_cpu=cpu) is None
