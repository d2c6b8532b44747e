"""Calls under a context that are refused on every rank, and what a context replaces."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from cake.core.cp import _exchange
from cake.core.testing import assert_bitwise_equal
from cake.kda import build_kcp_context, chunk_kda, kcp_chunk_kda, last_route


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture
def tensors(make):
    def of(bounds):
        case = make([end - start for start, end in pairwise(bounds)], heads=(1, 2), state=False)
        return {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}

    return of


def fla_context(rank):
    """What flash-linear-attention's builder gives a rank of three that share one document of 240 tokens."""
    kind = type("FLACPContext", (SimpleNamespace,), {"__module__": "fla.ops.cp.context"})
    boundaries = torch.tensor([0, 80], dtype=torch.int32)
    edges = {"pre_num_ranks": rank, "post_num_ranks": 2 - rank}
    return kind(group=object(), layout="contiguous", cu_seqlens_cpu=boundaries, **edges)


class TestRefusals:
    """On every rank, when the call is made, before anything is exchanged."""

    @pytest.fixture(autouse=True)
    def _no_exchange(self, monkeypatch):
        def forbidden(*_):
            raise AssertionError("a refused call must not communicate")

        monkeypatch.setattr(_exchange, "_gather", forbidden)

    @pytest.fixture(params=[0, 1, 2], ids="rank{}".format)
    def context(self, request, monkeypatch):
        import torch.distributed as dist

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: request.param)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
        return build_kcp_context((0, 240))

    @pytest.fixture
    def arguments(self, tensors):
        return tensors((0, 80))

    @pytest.fixture(params=["kcp", "fla"])
    def any_context(self, request, context):
        return context if request.param == "kcp" else fla_context(context.rank)

    @pytest.mark.parametrize("function", [chunk_kda, kcp_chunk_kda])
    def test_states(self, context, arguments, function):
        state = torch.zeros(1, 2, 128, 128)
        with pytest.raises(ValueError, match="initial_state must be None under cp_context, got a tensor"):
            function(**arguments, cp_context=context, initial_state=state)
        with pytest.raises(ValueError, match="output_final_state must be False under cp_context, got True"):
            function(**arguments, cp_context=context, output_final_state=True)

    def test_states_under_any_context(self, any_context, arguments):
        with pytest.raises(ValueError, match="initial_state must be None under cp_context"):
            chunk_kda(**arguments, cp_context=any_context, initial_state=torch.zeros(1, 2, 128, 128))
        with pytest.raises(ValueError, match="output_final_state must be False under cp_context"):
            chunk_kda(**arguments, cp_context=any_context, output_final_state=True)

    def test_other_tokens(self, any_context, arguments):
        shorter = {name: x[:, :79] for name, x in arguments.items()}
        with pytest.raises(ValueError, match=r"q must be \[1, 80, H, 128\], this rank's tokens .* T=79"):
            chunk_kda(**shorter, cp_context=any_context)
        rows = {name: x.expand(2, *x.shape[1:]) for name, x in arguments.items()}
        with pytest.raises(ValueError, match="got B=2 and T=80"):
            chunk_kda(**rows, cp_context=any_context)

    def test_wrong_inputs(self, any_context, arguments):
        with pytest.raises(TypeError, match="q must be bfloat16"):
            chunk_kda(**{**arguments, "q": arguments["q"].float()}, cp_context=any_context)
        with pytest.raises(NotImplementedError, match="chunk_size must be 64, got 32"):
            chunk_kda(**arguments, cp_context=any_context, chunk_size=32)

    @pytest.mark.parametrize("options", [{"segments": 2}, {"packing_invariant": True}], ids=str)
    def test_segments(self, any_context, arguments, options):
        with pytest.raises(NotImplementedError, match="aren't served under cp_context"):
            chunk_kda(**arguments, cp_context=any_context, **options)

    def test_kcp_alone(self, arguments, context):
        for given in (None, fla_context(context.rank)):
            with pytest.raises(NotImplementedError, match="must be a KcpContext of build_kcp_context, got"):
                kcp_chunk_kda(**arguments, cp_context=given)

    def test_something_else(self, arguments):
        with pytest.raises(TypeError, match=r"must be a KcpContext .* got str"):
            chunk_kda(**arguments, cp_context="ring")


def test_the_contexts_boundaries_replace_the_arguments(tensors):
    arguments = tensors((0, 30, 100))
    context = build_kcp_context((0, 30, 100))
    o, final = kcp_chunk_kda(**arguments, cp_context=context)
    assert final is None
    assert str(last_route()) == "KCP, det, torch, states saved"
    again, _ = chunk_kda(
        **arguments, cp_context=context, cu_seqlens=torch.tensor([0, 100]), cu_seqlens_cpu=[5]
    )
    assert_bitwise_equal("o", again, o)
    single, _ = chunk_kda(**arguments, cu_seqlens_cpu=[0, 30, 100])
    assert_bitwise_equal("o", o, single)


def test_a_call_without_tokens(tensors):
    inputs = [x.requires_grad_() for x in tensors((0, 0)).values()]
    before = last_route()
    o, _ = chunk_kda(*inputs, cp_context=build_kcp_context((0, 0)))
    assert o.shape == (1, 0, 2, 128)
    assert last_route() is before
    assert [x.shape for x in torch.autograd.grad(o.sum(), inputs)] == [x.shape for x in inputs]
