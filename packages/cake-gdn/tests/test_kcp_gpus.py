"""Packs over several GPUs, with NCCL."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cake.core.testing import Ranks, assert_bitwise_equal
from cake.gdn import build_kcp_context, kcp_chunk_gated_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BOUNDS = (0, 3, 700, 700, 1900, 2048)


def part(group, tensors, layout, times, checkpointed):
    """One rank's forwards, then its backwards: results of the last ones, and the rank's fragments."""
    context = build_kcp_context(BOUNDS, group, layout=layout, device="cuda")
    inputs = {name: context.shard(x).cuda().requires_grad_() for name, x in tensors.items() if name != "do"}
    do = context.shard(tensors["do"]).cuda()

    def layer(*values):
        arguments = dict(zip(inputs, values, strict=True))
        return kcp_chunk_gated_delta_rule(**arguments, cp_context=context, use_qk_l2norm_in_kernel=True)[0]

    outputs = [
        layer(*inputs.values())
        if checkpointed is None
        else checkpoint(layer, *inputs.values(), use_reentrant=checkpointed)
        for _ in range(times)
    ]
    for o in outputs:
        for x in inputs.values():
            x.grad = None
        o.backward(do)
    results = {"o": outputs[-1].detach(), **{f"d{name}": x.grad for name, x in inputs.items()}}
    return {name: x.cpu() for name, x in results.items()}, context.fragments


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, backend="nccl") as pool:
        yield pool


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture
def case(make):
    return make([b - a for a, b in pairwise(BOUNDS)], heads=(2, 4), gate=-0.01, state=False)


@pytest.fixture
def given(case):
    return {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "do")}


def whole(parts, total):
    got = {}
    for results, fragments in parts:
        for name, x in results.items():
            into = got.setdefault(name, x.new_full((1, total, *x.shape[2:]), float("nan")))
            first = 0
            for start, end in fragments:
                into[:, start:end] = x[:, first : first + end - start]
                first += end - start
    return got


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_accuracy(ranks, case, given, assert_accurate, layout):
    parts = ranks.values(part, given, layout, 1, None)
    # Under slow decay dg is nearly one sum for all tokens, and so is its error.
    assert_accurate(case, whole(parts, BOUNDS[-1]), {"dg": 1.6})


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpoints_and_micro_batches_give_the_same_bits(ranks, given, reentrant):
    plain = ranks.values(part, given, "zigzag", 1, None)
    for times, checkpointed in ((1, None), (3, None), (2, reentrant)):
        again = ranks.values(part, given, "zigzag", times, checkpointed)
        for (got, _), (expected, _) in zip(again, plain, strict=True):
            for name, x in expected.items():
                assert_bitwise_equal(name, got[name], x)
