"""Contexts on every device: chains of pieces in any order on one rank, which has nobody to ask."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from cake.core import segments
from cake.core.cp import _joint, cut_of
from cake.core.testing import poisoned_empty, relative_error
from cake.kda import _segments, _torch, build_kcp_context, chunk_kda, kcp_chunk_kda, last_route

BOUNDS = (0, 3, 203, 203, 500, 532)
CUTS = (0, 3, 100, 164, 203, 270, 400, 500, 520, 532)


@pytest.fixture(params=["in parts", "at once", "at once, cut"])
def walk(request, monkeypatch, device):
    """Runs a case with its tokens in another order, and returns results in the pack's."""
    if device.type == "cuda" and request.param == "in parts":
        pytest.skip("the kernels walk all sequences at once")
    monkeypatch.setattr(_torch, "SELECTIONS", request.param == "in parts")
    if request.param == "at once, cut":
        # Plans cut sequences that are too short to be worth it.
        monkeypatch.setattr(_segments, "RATES", segments.Cost(start=0, merge_start=0, merge=0))
        monkeypatch.setattr(segments, "LENGTHS", (1, 2))
        monkeypatch.setattr(_joint, "MOST_CHUNKS", 2)

    def run(case, seed=0, **options):
        pieces = list(pairwise(CUTS))
        random.Random(seed).shuffle(pieces)
        context = build_kcp_context(BOUNDS, fragments=[pieces])
        cut = cut_of(context.plan(device.type), case.v.shape[2], _segments.RATES)
        assert (max(map(len, cut.runs)) > 1) == (request.param == "at once, cut")
        inputs = {name: context.shard(x).detach().requires_grad_() for name, x in case.tensors().items()}
        o, _ = kcp_chunk_kda(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True, **options)
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
def test_accuracy(make, walk, assert_accurate, lengths, gate):
    case = make(lengths, heads=(1, 2), gate=gate, state=False)
    with poisoned_empty():
        got = walk(case)
    assert last_route().path == "kcp"
    # Under slow decay dg is nearly one sum for all tokens, and so is its error.
    assert_accurate(case, got, 1.6 if gate in (-0.01, 0.0) else 1.0)


def test_recomputed_states(make, walk, assert_same_bits, lengths):
    case = make(lengths, heads=(1, 2), gate=-0.05, state=False)
    saved = walk(case, recompute_state=False)
    with poisoned_empty():
        assert_same_bits(walk(case, recompute_state=True), saved)
        assert_same_bits(walk(case, disable_recompute=True), saved)
        assert_same_bits(walk(case), saved)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_gates_in_the_call(make, walk, lengths, bound):
    """The gates' parameters get the gradients that they get without a context."""
    case = make(lengths, heads=(1, 2), state=False)
    values = torch.Generator().manual_seed(1)
    a_log, bias, raw = (torch.randn(n, generator=values).to(case.q.device) for n in (2, 256, case.g.shape))
    how = {"use_gate_in_kernel": True, "lower_bound": bound, "safe_gate": bound is not None}
    parameters = [x.requires_grad_() for x in (a_log, bias)]
    got = walk(case.replace(g=raw), A_log=parameters[0], dt_bias=parameters[1], **how)
    inputs = {name: x.requires_grad_() for name, x in case.replace(g=raw).tensors().items()}
    o, _ = chunk_kda(
        **inputs, A_log=parameters[0], dt_bias=parameters[1], use_qk_l2norm_in_kernel=True,
        cu_seqlens_cpu=case.boundaries, segments=1, **how,
    )  # fmt: skip
    expected = torch.autograd.grad(o, [*inputs.values(), *parameters], case.do)
    for x, whole in zip((got["o"], *(got[f"d{name}"] for name in inputs)), (o, *expected), strict=False):
        assert relative_error(x, whole) < 6e-3
    for x, whole in zip((got["dA_log"], got["ddt_bias"]), expected[-2:], strict=True):
        assert relative_error(x, whole) < 6e-3
