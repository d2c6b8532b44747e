"""The FP64 recurrence against autograd on the plainest form of it."""

from __future__ import annotations

import itertools
from dataclasses import astuple

import pytest
import torch


@pytest.fixture
def reference(op):
    return op.module("reference")


@pytest.fixture
def inputs(op):
    """Random tensors with as many gates as the op has."""
    return lambda *arguments, **how: tensors_of(op.name == "kda", *arguments, **how)


def plain(q, k, v, g, beta, state, scale, l2norm, boundaries):
    """One token at a time, one formula a line, differentiated by autograd."""
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2).flatten(0, 1) for x in (q, k))
    v, g, beta = v.flatten(0, 1), g.flatten(0, 1), beta.flatten(0, 1)
    o, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(boundaries)):
        s = state[n]
        for t in range(start, end):
            s = s * g[t].exp().reshape(len(s), -1, 1)
            delta = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + torch.einsum("hk,hv->hkv", k[t], delta)
            o.append(scale * torch.einsum("hkv,hk->hv", s, q[t]))
        states.append(s)
    return torch.stack(o), torch.stack(states)


def tensors_of(channels, rows, tokens, n, heads=(2, 4), dims=(6, 5), seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    (h, hv), (dim, v_dim) = heads, dims
    return (
        normal(rows, tokens, h, dim),
        normal(rows, tokens, h, dim),
        normal(rows, tokens, hv, v_dim),
        -normal(rows, tokens, hv, *[dim] * channels).abs(),
        torch.rand(rows, tokens, hv, generator=random, dtype=torch.float64),
        normal(n, hv, dim, v_dim),
        normal(rows, tokens, hv, v_dim),
        normal(n, hv, dim, v_dim),
    )


@pytest.mark.parametrize("l2norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(
    "boundaries", [(0, 9), (0, 1), (0, 3, 3, 10, 11), (0, 70, 200), (0, 65, 70, 135)], ids=str
)
def test_packed(inputs, reference, boundaries, l2norm):
    *tensors, do, dht = inputs(1, boundaries[-1], len(boundaries) - 1)
    leaves = [x.clone().requires_grad_() for x in tensors]
    o, final = plain(*leaves, 0.3, l2norm, boundaries)
    expected = torch.autograd.grad((o * do[0]).sum() + (final * dht).sum(), leaves)

    how = {"scale": 0.3, "initial_state": tensors[5], "use_qk_l2norm": l2norm, "boundaries": boundaries}
    got_o, got_final = reference.forward(*tensors[:5], **how)
    torch.testing.assert_close(got_o[0], o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_final, final, rtol=1e-12, atol=1e-12)
    for got, want in zip(astuple(reference.backward(*tensors[:5], do, dht, **how)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_rows_of_a_batch_are_sequences(inputs, reference):
    *tensors, do, dht = inputs(3, 7, 3)
    rows = reference.forward(*tensors[:5], initial_state=tensors[5])
    packed = [x.flatten(0, 1)[None] for x in tensors[:5]]
    pack = reference.forward(*packed, initial_state=tensors[5], boundaries=(0, 7, 14, 21))
    assert torch.equal(rows[0].flatten(0, 1), pack[0][0])
    assert torch.equal(rows[1], pack[1])
    of_rows = reference.backward(*tensors[:5], do, dht, initial_state=tensors[5])
    assert of_rows.dq.shape == tensors[0].shape
    assert of_rows.dg.shape == tensors[3].shape


def test_missing_gradients_count_as_zero(inputs, reference):
    *tensors, do, dht = inputs(1, 12, 1)
    both = reference.backward(*tensors[:5], do, dht)
    of_o = reference.backward(*tensors[:5], do)
    of_state = reference.backward(*tensors[:5], None, dht)
    for whole, a, b in zip(astuple(both), astuple(of_o), astuple(of_state), strict=True):
        torch.testing.assert_close(whole, a + b, rtol=1e-12, atol=1e-12)


def test_two_calls_are_one(inputs, reference):
    *tensors, _, _ = inputs(1, 20, 1)
    o, final = reference.forward(*tensors[:5])
    first, state = reference.forward(*(x[:, :13] for x in tensors[:5]))
    second, last = reference.forward(*(x[:, 13:] for x in tensors[:5]), initial_state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(last, final, rtol=1e-12, atol=1e-14)


def test_no_tokens(reference, op):
    q = torch.zeros(1, 0, 2, 6)
    v = torch.zeros(1, 0, 4, 5)
    g, beta = torch.zeros(1, 0, 4, *[6] * (op.name == "kda")), torch.zeros(1, 0, 4)
    state = torch.randn(3, 4, 6, 5)
    o, final = reference.forward(q, q, v, g, beta, initial_state=state, boundaries=(0, 0, 0, 0))
    assert o.shape == (1, 0, 4, 5)
    assert torch.equal(final, state.double())
    grads = reference.backward(q, q, v, g, beta, None, state, initial_state=state, boundaries=(0, 0, 0, 0))
    assert torch.equal(grads.dh0, state.double())
    assert grads.dq.shape == q.shape


def test_fp64_runs_on_the_device(inputs, reference, device):
    *tensors, do, dht = (x.to(device) for x in inputs(1, 40, 2))
    how = {"initial_state": tensors[5], "boundaries": (0, 30, 40)}
    here = reference.backward(*tensors[:5], do, dht, **how)
    *host, do, dht = (x.cpu() for x in (*tensors, do, dht))
    there = reference.backward(*host[:5], do, dht, initial_state=host[5], boundaries=(0, 30, 40))
    for a, b in zip(astuple(here), astuple(there), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("op", ["kda"], indirect=True)
def test_one_decay_for_all_channels_is_a_scalar_one(inputs, reference):
    q, k, v, g, beta, state, do, dht = inputs(1, 30, 1)
    g = g[..., :1]
    how = {"initial_state": state}
    per_channel = reference.backward(q, k, v, g.expand(-1, -1, -1, 6), beta, do, dht, **how)
    scalar = reference.backward(q, k, v, g[..., 0], beta, do, dht, **how)
    torch.testing.assert_close(per_channel.dk, scalar.dk, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(per_channel.dg.sum(-1), scalar.dg, rtol=1e-12, atol=1e-14)
