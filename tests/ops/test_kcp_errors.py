"""Calls under a context that are refused on every rank, and what a context replaces."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from cake.core.cp import _exchange, build_kcp_context
from cake.core.testing import assert_bitwise_equal


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

    @pytest.mark.parametrize("name", ["chunk", "kcp_chunk"])
    def test_states(self, op, context, arguments, name):
        function = getattr(op, name)
        state = torch.zeros(1, 2, 128, 128)
        with pytest.raises(ValueError, match="initial_state must be None under cp_context, got a tensor"):
            function(**arguments, cp_context=context, initial_state=state)
        with pytest.raises(ValueError, match="output_final_state must be False under cp_context, got True"):
            function(**arguments, cp_context=context, output_final_state=True)

    def test_states_under_any_context(self, op, any_context, arguments):
        with pytest.raises(ValueError, match="initial_state must be None under cp_context"):
            op.chunk(**arguments, cp_context=any_context, initial_state=torch.zeros(1, 2, 128, 128))
        with pytest.raises(ValueError, match="output_final_state must be False under cp_context"):
            op.chunk(**arguments, cp_context=any_context, output_final_state=True)

    def test_other_tokens(self, op, any_context, arguments):
        shorter = {name: x[:, :79] for name, x in arguments.items()}
        with pytest.raises(ValueError, match=r"q must be \[1, 80, H, 128\], this rank's tokens .* T=79"):
            op.chunk(**shorter, cp_context=any_context)
        rows = {name: x.expand(2, *x.shape[1:]) for name, x in arguments.items()}
        with pytest.raises(ValueError, match="got B=2 and T=80"):
            op.chunk(**rows, cp_context=any_context)

    def test_wrong_inputs(self, op, any_context, arguments):
        with pytest.raises(TypeError, match="q must be bfloat16"):
            op.chunk(**{**arguments, "q": arguments["q"].float()}, cp_context=any_context)
        with pytest.raises(NotImplementedError, match="chunk_size must be 64, got 32"):
            op.chunk(**arguments, cp_context=any_context, chunk_size=32)

    @pytest.mark.parametrize("options", [{"segments": 2}, {"packing_invariant": True}], ids=str)
    def test_segments(self, op, any_context, arguments, options):
        with pytest.raises(NotImplementedError, match="aren't served under cp_context"):
            op.chunk(**arguments, cp_context=any_context, **options)

    @pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
    def test_tangents(self, op, any_context, arguments, name):
        # No rank knows another one's.
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
            with pytest.raises(NotImplementedError, match=f"got a dual tensor {name}"):
                op.chunk(**{**arguments, name: dual}, cp_context=any_context)

    @pytest.mark.parametrize("op", ["gdn"], indirect=True)
    def test_a_backend_without_the_stages(self, op, any_context, arguments, monkeypatch):
        monkeypatch.delattr(op.module("_torch"), "transfer")
        with pytest.raises(NotImplementedError, match="cp_context isn't served by the torch backend"):
            op.chunk(**arguments, cp_context=any_context)

    def test_kcp_alone(self, op, arguments, context):
        for given in (None, fla_context(context.rank)):
            with pytest.raises(NotImplementedError, match="must be a KcpContext of build_kcp_context, got"):
                op.kcp_chunk(**arguments, cp_context=given)

    def test_something_else(self, op, arguments):
        with pytest.raises(TypeError, match=r"must be a KcpContext .* got str"):
            op.chunk(**arguments, cp_context="ring")


def test_the_contexts_boundaries_replace_the_arguments(op, tensors):
    arguments = tensors((0, 30, 100))
    context = build_kcp_context((0, 30, 100))
    o, final = op.kcp_chunk(**arguments, cp_context=context)
    assert final is None
    assert str(op.package.last_route()) == "KCP, det, torch, states saved"
    again, _ = op.chunk(
        **arguments, cp_context=context, cu_seqlens=torch.tensor([0, 100]), cu_seqlens_cpu=[5]
    )
    assert_bitwise_equal("o", again, o)
    single, _ = op.chunk(**arguments, cu_seqlens_cpu=[0, 30, 100])
    assert_bitwise_equal("o", o, single)


def test_a_call_without_tokens(op, tensors):
    inputs = [x.requires_grad_() for x in tensors((0, 0)).values()]
    before = op.package.last_route()
    o, _ = op.chunk(*inputs, cp_context=build_kcp_context((0, 0)))
    assert o.shape == (1, 0, 2, 128)
    assert op.package.last_route() is before
    assert [x.shape for x in torch.autograd.grad(o.sum(), inputs)] == [x.shape for x in inputs]
