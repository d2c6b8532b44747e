"""The contract between the op and its stages, held by the twins and by the kernels."""

from __future__ import annotations

import math

import pytest
import torch

from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.gdn import _stages, plan, reference

SCALE = 128**-0.5
LENGTHS = (1, 64, 0, 65, 200, 63)


@pytest.fixture
def stages(device):
    return _stages.stages(_stages.backend_name(device))


@pytest.fixture
def logical(stages):
    """The states of a tape as [V, K], however a backend arranges them."""
    return getattr(stages, "logical_states", lambda tape: tape)


@pytest.fixture(params=[True, False], ids=["state", "no-state"])
def case(request, make):
    return make(LENGTHS, heads=(2, 4), state=request.param, seed=2)


@pytest.fixture
def seqs(case):
    return plan.packed(case.boundaries, case.boundaries[-1])


@pytest.fixture
def prepared(stages, case, seqs):
    with poisoned_empty():
        return stages.prep(case.k, case.g, case.beta, seqs, l2norm=True)


def heads_first(x):
    """[1, T, h, ...] -> [h, T, ...] in FP64."""
    return x[0].double().transpose(0, 1)


def norms(x):
    """1 / |x| of rows, [h, T]."""
    return (heads_first(x).square().sum(-1) + 1e-6).rsqrt()


class TestPrep:
    def test_norms(self, stages, case, seqs, prepared):
        assert prepared.rk.dtype == torch.float32
        assert relative_error(prepared.rk, norms(case.k)) < 1e-6
        plain = stages.prep(case.k, case.g, case.beta, seqs, l2norm=False)
        assert (plain.rk == 1).all()

    def test_decays(self, case, seqs, prepared):
        assert prepared.b.dtype == torch.float32
        g = heads_first(case.g)
        for _, _, start, rows in seqs.chunks:
            part = slice(start, start + rows)
            exact = g[:, part].cumsum(-1) / math.log(2)
            torch.testing.assert_close(prepared.b[:, part].double(), exact, rtol=1e-5, atol=1e-5)

    def test_decays_are_cut_at_88(self, stages, case, seqs):
        g = torch.full_like(case.g, -1e4)
        b = stages.prep(case.k, g, case.beta, seqs, l2norm=True).b
        assert torch.isfinite(b).all()
        first = b[:, [start for _, _, start, _ in seqs.chunks]].double()
        torch.testing.assert_close(first, torch.full_like(first, -88 / math.log(2)))

    def test_inverses(self, case, seqs, prepared):
        assert prepared.t.dtype == torch.bfloat16
        assert prepared.t.shape == (4, seqs.total, 64)
        assert torch.isfinite(prepared.t).all()
        k = heads_first(case.k)
        k = (k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(2, 0)
        g, beta = heads_first(case.g), heads_first(case.beta)
        for _, _, start, rows in seqs.chunks:
            part = slice(start, start + rows)
            t = prepared.t[:, part]
            assert not t[..., rows:].any()
            assert not t.triu(1).any()
            b = g[:, part].cumsum(-1)
            decay = (b[..., :, None] - b[..., None, :]).tril(-1).exp()
            lower = (beta[:, part, None] * (k[:, part] @ k[:, part].mT) * decay).tril(-1)
            exact = torch.linalg.inv(torch.eye(rows, device=k.device, dtype=k.dtype) + lower)
            assert relative_error(t[..., :rows], exact) < 3e-3


class TestScan:
    def run(self, stages, case, seqs, prepared, **arguments):
        with poisoned_empty():
            return stages.scan(
                case.q,
                case.k,
                case.v,
                case.beta,
                prepared,
                seqs,
                scale=SCALE,
                l2norm=True,
                initial_state=case.initial_state,
                **arguments,
            )

    def test_states_lie_in_their_slots(self, stages, logical, case, seqs, prepared):
        edge = case.initial_state is not None
        _, _, tape = self.run(stages, case, seqs, prepared, save_states=True)
        assert tape.dtype == torch.bfloat16
        assert tape.shape == (seqs.slots(edge), 4, 128, 128)
        states = logical(tape).double().mT
        for n, c, start, _ in seqs.chunks:
            first = case.boundaries[n]
            slot = seqs.state_slot(n, c, with_edge=edge)
            if slot is None:
                continue
            before = [x[:, first:start] for x in (case.q, case.k, case.v, case.g, case.beta)]
            entering = None if not edge else case.initial_state[n : n + 1]
            _, exact = reference.forward(*before, initial_state=entering, boundaries=(0, start - first))
            assert relative_error(states[slot : slot + 1], exact) < 5e-3
        if edge:
            # Bitwise: the state before a first chunk is the initial one, rounded.
            first = [seqs.state_slot(n, 0, with_edge=True) for n in range(seqs.n) if seqs.lengths[n]]
            full = [n for n in range(seqs.n) if seqs.lengths[n]]
            assert_bitwise_equal(
                "first states", logical(tape)[first].mT.contiguous(), case.initial_state[full].bfloat16()
            )

    def test_only_what_is_asked_for(self, stages, case, seqs, prepared):
        o, final, states = self.run(stages, case, seqs, prepared)
        assert final is None
        assert states is None
        whole = self.run(stages, case, seqs, prepared, output_final_state=True, save_states=True)
        assert_bitwise_equal("o", o, whole[0])
        nothing, final, states = self.run(
            stages, case, seqs, prepared, output_final_state=True, save_states=True, need_output=False
        )
        assert nothing is None
        assert_bitwise_equal("final", final, whole[1])
        assert_bitwise_equal("states", states, whole[2])

    def test_layouts(self, stages, case, seqs, prepared):
        o, final, _ = self.run(stages, case, seqs, prepared, output_final_state=True)
        assert o.is_contiguous()
        assert (o.dtype, o.shape) == (torch.bfloat16, case.v.shape)
        assert (final.dtype, final.shape) == (torch.float32, (6, 4, 128, 128))


class TestAdjoint:
    def run(self, stages, case, seqs, prepared, *, l2norm=True, **arguments):
        with poisoned_empty():
            return stages.adj(
                case.q,
                case.k,
                case.do,
                case.beta,
                prepared,
                seqs,
                scale=SCALE,
                l2norm=l2norm,
                dht=case.dht,
                **arguments,
            )

    def test_norms(self, stages, case, seqs, prepared):
        *_, rq = self.run(stages, case, seqs, prepared)
        assert rq.dtype == torch.float32
        assert relative_error(rq, norms(case.q)) < 1e-6
        *_, plain = self.run(stages, case, seqs, prepared, l2norm=False)
        assert (plain == 1).all()

    def test_adjoints_lie_in_their_slots(self, stages, logical, case, seqs, prepared):
        edge = case.dht is not None
        _, tape, dh0, _ = self.run(stages, case, seqs, prepared, need_dh0=True)
        assert tape.dtype == torch.bfloat16
        assert tape.shape == (seqs.slots(edge), 4, 128, 128)
        adjoints = logical(tape).double().mT
        tokens = (case.q, case.k, case.v, case.g, case.beta, case.do)
        for n, c, start, rows in seqs.chunks:
            end = case.boundaries[n + 1]
            slot = seqs.adjoint_slot(n, c, with_edge=edge)
            if slot is None:
                continue
            after = [x[:, start + rows : end] for x in tokens]
            leaving = None if not edge else case.dht[n : n + 1]
            exact = reference.backward(*after, leaving, boundaries=(0, end - start - rows)).dh0
            assert relative_error(adjoints[slot : slot + 1], exact) < 5e-3
        exact = reference.backward(*tokens, case.dht, boundaries=case.boundaries).dh0
        assert relative_error(dh0, exact) < 4e-3

    def test_only_what_is_asked_for(self, stages, case, seqs, prepared):
        y, tape, dh0, _ = self.run(stages, case, seqs, prepared)
        assert dh0 is None
        whole = self.run(stages, case, seqs, prepared, need_dh0=True)
        assert_bitwise_equal("y", y, whole[0])
        assert_bitwise_equal("adjoint states", tape, whole[1])
        assert (y.dtype, y.shape) == (torch.bfloat16, case.v.shape)

    def test_y_is_dv(self, stages, case, seqs, prepared, truth):
        y, *_ = self.run(stages, case, seqs, prepared)
        assert relative_error(y, truth(case)["dv"]) < 5e-3


def test_out_gives_what_the_op_gives(stages, case, seqs, prepared, call):
    q, k, v, do, beta = case.q, case.k, case.v, case.do, case.beta
    edge = case.initial_state is not None
    with poisoned_empty():
        o, final, states = stages.scan(
            q,
            k,
            v,
            beta,
            prepared,
            seqs,
            scale=SCALE,
            l2norm=True,
            initial_state=case.initial_state,
            output_final_state=edge,
            save_states=True,
        )
        y, adj_states, dh0, rq = stages.adj(
            q, k, do, beta, prepared, seqs, scale=SCALE, l2norm=True, dht=case.dht, need_dh0=edge
        )
        dq, dk, dv, dbeta, dg = stages.out(
            q,
            k,
            v,
            do,
            y,
            beta,
            prepared,
            states,
            adj_states,
            rq,
            seqs,
            scale=SCALE,
            l2norm=True,
            states_edge=edge,
            adj_edge=edge,
        )
    got = {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}
    got |= {"ht": final, "dh0": dh0} if edge else {}
    expected = call(case)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(name, got[name], x)
