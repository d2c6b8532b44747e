"""Initial and final states: layouts, copies, calls without tokens."""

from __future__ import annotations

import pytest
import torch

from cake.core.testing import assert_bitwise_equal, permuted_view


def transposed(x):
    return None if x is None else x.transpose(-1, -2).contiguous()


def test_state_v_first(make, call, assert_same_bits):
    case = make((70, 1, 129))
    expected = call(case)
    flipped = case.replace(initial_state=transposed(case.initial_state), dht=transposed(case.dht))
    for spelling in ({"state_v_first": True}, {"transpose_state_layout": True}):
        got = call(flipped, **spelling)
        assert got["ht"].is_contiguous()
        assert_same_bits(got | {n: transposed(got[n]) for n in ("ht", "dh0")}, expected)
    assert_same_bits(call(case, transpose_state_layout=False), expected)


def test_final_state_is_none_unless_asked_for(op, make):
    case = make((20,))
    o, final = op.chunk(case.q, case.k, case.v, case.g, case.beta)
    assert final is None
    assert o.shape == case.v.shape
    assert o.dtype == torch.bfloat16
    assert o.is_contiguous()


def test_final_state_is_fp32_k_first(op, make):
    case = make((20, 0, 5), heads=(2, 4))
    _, final = op.chunk(
        case.q, case.k, case.v, case.g, case.beta, output_final_state=True, cu_seqlens_cpu=case.boundaries
    )
    assert final.shape == (3, 4, 128, 128)
    assert final.dtype == torch.float32
    assert final.is_contiguous()
    assert not final[1].any()


def test_strided_states_and_gradients(make, call, assert_same_bits):
    case = make((70, 65))
    expected = call(case)
    strided = case.replace(
        initial_state=permuted_view(case.initial_state, (1, 3, 0, 2)),
        dht=permuted_view(case.dht, (3, 2, 1, 0)),
    )
    assert not strided.initial_state.is_contiguous()
    assert_same_bits(call(strided), expected)


def test_expanded_state_and_gradient(make, call, assert_same_bits):
    case = make((70, 65))
    one, grad = case.initial_state[:1], case.dht[:1, :1]
    expanded = case.replace(initial_state=one.expand(2, -1, -1, -1), dht=grad.expand(2, 2, -1, -1))
    plain = case.replace(initial_state=expanded.initial_state.contiguous(), dht=expanded.dht.contiguous())
    assert_same_bits(call(expanded), call(plain))


def test_the_initial_state_is_left_alone(make, call):
    case = make((70, 0, 65))
    before = case.map(torch.clone)
    call(case)
    for name, x in case.tensors().items():
        assert_bitwise_equal(name, x, before.tensors()[name])


@pytest.mark.parametrize("form", ["batch", "pack", "many"])
class TestNoTokens:
    def case(self, make, form):
        if form == "batch":
            return make((0,), heads=(2, 4), batch=3)
        return make((0,) if form == "pack" else (0,) * 8, heads=(2, 4))

    def test_state_passes_through(self, op, make, call, form, tape, monkeypatch):
        monkeypatch.setattr(op.module("_stages"), "stages", lambda name: pytest.fail("launched"))
        case = self.case(make, form)
        got = call(case, **tape)
        assert got["o"].shape == case.v.shape
        assert got["o"].dtype == torch.bfloat16
        assert_bitwise_equal("ht", got["ht"], case.initial_state)
        assert_bitwise_equal("dh0", got["dh0"], case.dht)
        for name in ("q", "k", "v", "g", "beta"):
            x = getattr(case, name)
            assert got[f"d{name}"].shape == x.shape
            assert got[f"d{name}"].dtype == x.dtype

    def test_zero_without_a_state(self, op, make, form, tape):
        case = self.case(make, form)
        route = op.package.last_route()
        o, final = op.chunk(
            case.q,
            case.k,
            case.v,
            case.g,
            case.beta,
            output_final_state=True,
            cu_seqlens_cpu=case.boundaries,
            **tape,
        )
        assert o.shape == case.v.shape
        assert final.shape == case.initial_state.shape
        assert not final.any()
        assert op.package.last_route() is route

    def test_the_final_state_is_a_copy(self, op, make, form, tape):
        case = self.case(make, form)
        _, final = op.chunk(
            case.q,
            case.k,
            case.v,
            case.g,
            case.beta,
            initial_state=case.initial_state,
            output_final_state=True,
            cu_seqlens_cpu=case.boundaries,
            **tape,
        )
        assert final.data_ptr() != case.initial_state.data_ptr()

    def test_loss_on_the_output_alone(self, make, call, form, tape):
        case = self.case(make, form).replace(dht=None)
        got = call(case, final=True, **tape)
        assert not got["dh0"].any()
