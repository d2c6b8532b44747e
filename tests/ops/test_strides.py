"""Views in, gradients of any layout back: the bits of contiguous tensors, and nothing written to inputs."""

from __future__ import annotations

import pytest
import torch

from cake.core.testing import (
    assert_bitwise_equal,
    end_of_allocation,
    fused_views,
    permuted_view,
    pitched_view,
    relative_error,
    spread_view,
)


def test_views_of_one_projection(make, call, assert_same_bits):
    case = make((70, 65), heads=(2, 4))
    buffer, (q, k, v) = fused_views(case.q, case.k, case.v)
    assert q.data_ptr() == buffer.data_ptr()
    assert not v.is_contiguous()
    assert_same_bits(call(case.replace(q=q, k=k, v=v)), call(case))


def test_gradients_through_a_projection(op, make, device):
    case = make((70, 65), heads=(2, 4))
    buffer, (q, k, v) = fused_views(case.q, case.k, case.v, requires_grad=True)
    o, _ = op.chunk(q, k, v, case.g, case.beta, cu_seqlens_cpu=case.boundaries)
    (grad,) = torch.autograd.grad(o, buffer, case.do)
    apart = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    o, _ = op.chunk(*apart, case.g, case.beta, cu_seqlens_cpu=case.boundaries)
    parts = torch.autograd.grad(o, apart, case.do)
    assert_bitwise_equal("gradient of the buffer", grad, torch.cat([x.flatten(2) for x in parts], -1))


@pytest.mark.parametrize("batch", [None, 3], ids=["pack", "batch"])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)], ids=str)
def test_permuted_inputs(make, call, assert_same_bits, order, batch):
    case = make((70,), heads=(2, 4), batch=batch)
    permuted = case.replace(
        **{name: permuted_view(getattr(case, name), order) for name in ("q", "k", "v", "do")}
    )
    assert_same_bits(call(permuted), call(case))


def test_each_input_has_strides_of_its_own(make, call, assert_same_bits):
    case = make((70,), heads=(2, 4), batch=2)
    mixed = case.replace(
        q=permuted_view(case.q, (0, 2, 1, 3)),
        k=pitched_view(case.k, 136),
        v=pitched_view(case.v, 192, offset=64),
    )
    assert_same_bits(call(mixed), call(case))


def test_expanded_inputs(make, call, assert_same_bits):
    case = make((70,), heads=(2, 4), batch=2)
    q, v = case.q[:, :, :1].expand(-1, -1, 2, -1), case.v[:1].expand(2, -1, -1, -1)
    expanded = case.replace(q=q, v=v)
    assert_same_bits(call(expanded), call(expanded.replace(q=q.contiguous(), v=v.contiguous())))


@pytest.mark.parametrize("name", ["g", "beta"])
def test_gates_of_any_stride(make, call, assert_same_bits, name):
    case = make((70, 65), heads=(2, 4))
    expected = call(case)
    x = getattr(case, name)
    if x.ndim == 4:  # a gate for each channel, whose rows are contiguous
        views = [pitched_view(x, 192, offset=64), permuted_view(x, (0, 2, 1, 3))]
    else:
        views = [pitched_view(x, 40, offset=3), permuted_view(x, (0, 2, 1))]
        views += [spread_view(x), spread_view(x, axis=1, step=3)]
    for view in views:
        assert not view.is_contiguous()
        assert_same_bits(call(case.replace(**{name: view})), expected)
    ones = x[:, :1, :1].expand_as(x)
    assert_same_bits(call(case.replace(**{name: ones})), call(case.replace(**{name: ones.contiguous()})))


class TestGradientsOfTheOutput:
    """Whatever layout autograd hands back."""

    def test_of_a_sum(self, make, call, assert_same_bits):
        case = make((70, 65))
        ones = torch.ones_like(case.do)
        expanded = ones.new_ones(()).expand_as(ones)
        assert expanded.stride() == (0, 0, 0, 0)
        assert_same_bits(call(case.replace(do=expanded)), call(case.replace(do=ones)))

    def test_of_a_sum_over_tokens(self, make, call, assert_same_bits):
        case = make((70, 65))
        row = case.do[:, :1]
        expanded = row.expand_as(case.do)
        assert_same_bits(call(case.replace(do=expanded)), call(case.replace(do=expanded.contiguous())))

    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: spread_view(x),
            lambda x: permuted_view(x, (0, 3, 1, 2)),
            lambda x: permuted_view(x, (0, 2, 1, 3)),
            lambda x: pitched_view(x, 129, offset=1),
            lambda x: pitched_view(x, 136, offset=8),
        ],
        ids=["spread", "channels-first", "heads-first", "odd-pitch", "pitch"],
    )
    def test_strided(self, make, call, assert_same_bits, layout):
        case = make((70, 65))
        assert_same_bits(call(case.replace(do=layout(case.do))), call(case))

    def test_the_real_thing(self, op, make, device):
        # Not a gradient handed in, but the one that autograd makes of o[..., ::2].sum().
        case = make((40,))
        v = case.v.requires_grad_()
        o, _ = op.chunk(case.q, case.k, v, case.g, case.beta)
        o[..., ::2].float().sum().backward()
        do = torch.zeros_like(o)
        do[..., ::2] = 1
        o, _ = op.chunk(case.q, case.k, v, case.g, case.beta)
        assert_bitwise_equal("dv", v.grad, torch.autograd.grad(o, v, do)[0])


def test_nothing_is_read_past_the_end(make, call, assert_same_bits):
    # Each tensor fills its allocation up to poisoned memory.
    for tokens in (1, 63, 65, 100):
        case = make((tokens,), heads=(1, 2))
        assert_same_bits(call(case.map(end_of_allocation)), call(case))


def test_inputs_are_left_alone(make, call):
    case = make((70, 65))
    before = case.map(torch.clone)
    call(case)
    call(case, recompute_state=True)
    for name, x in (*case.tensors().items(), ("do", case.do), ("dht", case.dht)):
        expected = before.do if name == "do" else before.dht if name == "dht" else before.tensors()[name]
        assert_bitwise_equal(name, x, expected)


@pytest.mark.parametrize("heads", [(1, 3), (2, 8), (2, 4), (3, 3)], ids=str)
def test_grouped_heads_are_repeated_heads(op, make, call, heads):
    h, hv = heads
    case = make((70, 65), heads=heads)
    grouped = call(case)
    repeated = call(
        case.replace(q=case.q.repeat_interleave(hv // h, 2), k=case.k.repeat_interleave(hv // h, 2))
    )
    for name in ("o", "ht", "dv", "dbeta", "dh0"):
        assert_bitwise_equal(name, grouped[name], repeated[name])
    if op.name == "gdn":
        # Its kernels take a head's share of q^ . dq^ from its group's running sum: dg to fp32 rounding.
        assert relative_error(grouped["dg"], repeated["dg"]) < 2e-5
    else:
        assert_bitwise_equal("dg", grouped["dg"], repeated["dg"])
    for name in ("dq", "dk"):
        total = repeated[name].double().unflatten(2, (h, hv // h)).sum(3)
        error = (grouped[name].double() - total).norm() / total.norm()
        # One bf16 rounding of each group's sum against one of each of its members.
        assert error < 4e-3, (name, error)
