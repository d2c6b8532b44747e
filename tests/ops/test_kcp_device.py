"""Contexts on every device: chains of pieces in any order on one rank, which has nobody to ask."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from cake.core import segments
from cake.core.cp import _joint, build_kcp_context, cut_of
from cake.core.testing import poisoned_empty, relative_error

BOUNDS = (0, 3, 203, 203, 500, 532)
CUTS = (0, 3, 100, 164, 203, 270, 400, 500, 520, 532)


@pytest.fixture(params=["in parts", "at once", "at once, cut"])
def walk(op, request, monkeypatch, device):
    """Runs a case with its tokens in another order, and returns results in the pack's."""
    if device.type == "cuda" and request.param == "in parts":
        pytest.skip("the kernels walk all sequences at once")
    monkeypatch.setattr(op.module("_torch"), "SELECTIONS", request.param == "in parts")
    if request.param == "at once, cut":
        # Plans cut sequences that are too short to be worth it.
        free = segments.Cost(start=0, merge_start=0, merge=0)
        monkeypatch.setattr(segments, "COST", free)
        monkeypatch.setattr(op.module("_segments"), "RATES", free, raising=False)
        monkeypatch.setattr(segments, "LENGTHS", (1, 2))
        monkeypatch.setattr(_joint, "MOST_CHUNKS", 2)

    def run(case, seed=0, **options):
        pieces = list(pairwise(CUTS))
        random.Random(seed).shuffle(pieces)
        context = build_kcp_context(BOUNDS, fragments=[pieces])
        rates = getattr(op.module("_segments"), "RATES", None)
        cut = cut_of(context.plan(device.type), case.v.shape[2], *([] if rates is None else [rates]))
        assert (max(map(len, cut.runs)) > 1) == (request.param == "at once, cut")
        inputs = {name: context.shard(x).detach().requires_grad_() for name, x in case.tensors().items()}
        o, _ = op.kcp_chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True, **options)
        parameters = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
        gradients = torch.autograd.grad(o, [*inputs.values(), *parameters.values()], context.shard(case.do))
        order = torch.cat([torch.arange(*piece) for piece in pieces]).argsort().to(o.device)
        names = ["o", *(f"d{name}" for name in inputs)]
        results = {name: x.detach()[:, order] for name, x in zip(names, (o, *gradients), strict=False)}
        sums = gradients[len(inputs) :]
        return results | {f"d{name}": x for name, x in zip(parameters, sums, strict=True)}

    return run


@pytest.fixture
def lengths():
    return tuple(end - start for start, end in pairwise(BOUNDS))


@pytest.mark.parametrize("gate", ["ordinary", -0.01, 0.0], ids=str)
def test_accuracy(op, make, walk, assert_accurate, lengths, gate):
    case = make(lengths, heads=(1, 2), gate=gate, state=False)
    with poisoned_empty():
        got = walk(case)
    assert op.package.last_route().path == "kcp"
    # Under slow decay dg is nearly one sum for all tokens, and so is its error.
    assert_accurate(case, got, 1.6 if gate in (-0.01, 0.0) else 1.0)


def test_whatever_is_kept(op, make, walk, assert_same_bits, lengths):
    case = make(lengths, heads=(1, 2), gate=-0.05, state=False)
    saved = walk(case, recompute_state=False)
    with poisoned_empty():
        for tape in op.own.TAPES.values():
            assert_same_bits(walk(case, **tape), saved)


@pytest.mark.parametrize(("op", "bound"), [("gdn", None), ("kda", None), ("kda", -5.0)], indirect=["op"])
def test_gates_in_the_call(op, make, walk, lengths, bound):
    """The gates' parameters get the gradients that they get without a context."""
    case = make(lengths, heads=(1, 2), state=False)
    values = torch.Generator().manual_seed(1)
    a_log, bias, raw = (
        torch.randn(shape, generator=values).to(case.q.device)
        for shape in (2, (2, *case.g.shape[3:]), case.g.shape)
    )
    how = {"use_gate_in_kernel": True}
    if bound is not None:
        how |= {"lower_bound": bound, "safe_gate": True}
    parameters = [x.requires_grad_() for x in (a_log, bias)]
    got = walk(case.replace(g=raw), A_log=parameters[0], dt_bias=parameters[1], **how)
    inputs = {name: x.requires_grad_() for name, x in case.replace(g=raw).tensors().items()}
    o, _ = op.chunk(
        **inputs, A_log=parameters[0], dt_bias=parameters[1], use_qk_l2norm_in_kernel=True,
        cu_seqlens_cpu=case.boundaries, segments=1, **how,
    )  # fmt: skip
    expected = torch.autograd.grad(o, [*inputs.values(), *parameters], case.do)
    for x, whole in zip((got["o"], *(got[f"d{name}"] for name in inputs)), (o, *expected), strict=False):
        assert relative_error(x, whole) < 6e-3
    for x, whole in zip((got["dA_log"], got["ddt_bias"]), expected[-2:], strict=True):
        assert relative_error(x, whole) < 6e-3
