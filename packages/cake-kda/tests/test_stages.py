"""The contract between the op and its stages, held by the twins and by the kernels."""

from __future__ import annotations

import math

import pytest
import torch

from cake.core import sequences
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _pairs, _stages, reference

SCALE = 128**-0.5
LENGTHS = (1, 64, 0, 65, 200, 63)


@pytest.fixture
def stages(device):
    return _stages.stages(_stages.backend_name(device, None))


@pytest.fixture
def logical(stages):
    """The states of a tape as [V, K], however a backend arranges them."""
    return getattr(stages, "logical_states", lambda tape: tape)


@pytest.fixture
def by_token(stages):
    """What `prep` made, by token, however a backend arranges it."""
    return getattr(stages, "logical_prep", lambda made, seqs: made)


@pytest.fixture(params=[True, False], ids=["state", "no-state"])
def case(request, make):
    return make(LENGTHS, heads=(2, 4), gate="mixed", state=request.param, seed=2)


@pytest.fixture
def seqs(case):
    return sequences.packed(case.boundaries, case.boundaries[-1])


@pytest.fixture
def prepare(stages):
    def run(case, seqs, gate=None, l2norm=True):
        with poisoned_empty():
            return stages.prep(case.q, case.k, case.g, gate, case.beta, seqs, scale=SCALE, l2norm=l2norm)

    return run


@pytest.fixture
def prepared(prepare, case, seqs):
    return prepare(case, seqs)


def heads_first(x):
    """[1, T, h, ...] -> [h, T, ...] in FP64."""
    return x[0].double().transpose(0, 1)


class Exact:
    """A chunk's matrices in FP64, pair by pair."""

    def __init__(self, case, start, rows, l2norm=True):
        part = slice(start, start + rows)
        q, k = (self.unit(x, l2norm)[:, part] for x in (case.q, case.k))
        b = heads_first(case.g)[:, part].cumsum(1)
        low = torch.ones(rows, rows, dtype=torch.bool, device=b.device).tril()
        decay = (b[:, :, None] - b[:, None]).masked_fill(~low[..., None], float("-inf")).exp()
        self.qg, self.kg, self.kr = SCALE * q * b.exp(), k * b.exp(), k * (b[:, -1:] - b).exp()
        self.last = b[:, -1].exp()
        self.p = SCALE * torch.einsum("hic,hjc,hijc->hij", q, k, decay)
        lower = torch.einsum("hic,hjc,hijc->hij", k, k, decay).tril(-1)
        lower = heads_first(case.beta)[:, part, None] * lower
        self.t = torch.linalg.inv(torch.eye(rows, dtype=b.dtype, device=b.device) + lower)

    @staticmethod
    def unit(x, l2norm):
        x = heads_first(x)
        norm = (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if l2norm else 1.0
        return (x * norm).repeat_interleave(2, 0)


class TestPairs:
    """Products of tokens under decays that no fp32 exponential of a sum could hold."""

    @pytest.mark.parametrize("gate", ["ordinary", "bounded", "mixed", "slow", 0.0, -88.0], ids=str)
    def test_against_all_pairs(self, make, gate):
        case = make((64,), heads=(1, 1), gate=gate)
        q, k = (heads_first(x)[None] / 11 for x in (case.q, case.k))
        b = heads_first(case.g).clamp_min(-88)[None].cumsum(-2) / math.log(2)
        low = torch.ones(64, 64, device=b.device).tril().bool()
        decay = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(~low[..., None], float("-inf")).exp2()
        a, n = _pairs.forward(q.float(), k.float(), b.float())
        exact = torch.einsum("...ic,...jc,...ijc->...ij", q, k, decay)
        # Two roundings to 10 bits; where every product but the diagonal has vanished they remain exact.
        assert relative_error(a, exact) < 1e-3
        exact = torch.einsum("...ic,...jc,...ijc->...ij", k, k, decay).tril(-1)
        assert (n.double() - exact).norm() < 1e-3 * exact.norm() + 1e-30
        assert not a.triu(1).any()
        assert not n.triu(0).any()

    @pytest.mark.parametrize("gate", ["ordinary", "bounded", "mixed", "slow"])
    def test_gradients(self, make, gate, device):
        case = make((64,), heads=(1, 2), gate=gate)
        q, k = (heads_first(x)[None].expand(1, 2, -1, -1) / 11 for x in (case.q, case.k))
        b = heads_first(case.g).clamp_min(-88)[None].cumsum(-2) / math.log(2)
        random = torch.Generator().manual_seed(5)
        da, dn = (
            torch.randn(1, 2, 64, 64, generator=random).bfloat16().to(device).double() for _ in range(2)
        )
        da, dn = da.tril(), dn.tril(-1)
        live = (torch.rand(1, 2, 64, 1, generator=random) > 0.3).to(device).double()
        leaves = [x.clone().requires_grad_() for x in (q, k, k, b)]
        low = torch.ones(64, 64, device=b.device).tril().bool()

        def loss(dn):
            exact_q, query_key, key, exact_b = leaves
            exponent = exact_b[..., :, None, :] - exact_b[..., None, :, :]
            decay = exponent.masked_fill(~low[..., None], float("-inf")).exp2()
            a = torch.einsum("...ic,...jc,...ijc->...ij", exact_q, key, decay)
            n = torch.einsum("...ic,...jc,...ijc->...ij", query_key, key, decay)
            return (a * da).sum() + (n * dn).sum()

        dq, _, dkey, db = torch.autograd.grad(loss(dn * live), leaves)
        (dquery_key,) = torch.autograd.grad(loss(dn), leaves[1:2])
        got = _pairs.backward(*(x.float() for x in (da, dn, live, q, k, b)))
        for name, x, want in (
            ("q", got.q, dq),
            ("query_key", got.query_key, dquery_key),
            ("key", got.key, dkey),
            ("b", got.b, db / math.log(2)),
        ):
            assert relative_error(x, want) < 4e-3, name
        # What one row of a pair gains the other loses.
        assert got.b.sum(-2).abs().max() < 1e-5 * got.b.abs().sum(-2).max()


class TestPrep:
    @pytest.mark.parametrize("l2norm", [True, False], ids=["norm", "plain"])
    def test_norms(self, prepare, case, seqs, l2norm):
        made = prepare(case, seqs, l2norm=l2norm)
        for x, got in ((case.q, made.rq), (case.k, made.rk)):
            assert got.dtype == torch.float32
            exact = (heads_first(x).square().sum(-1) + 1e-6).rsqrt()
            assert relative_error(got, exact if l2norm else torch.ones_like(exact)) < 1e-6

    def test_every_chunk(self, case, seqs, prepared, by_token):
        prepared = by_token(prepared, seqs)
        for place, (_, _, start, rows) in enumerate(seqs.chunks):
            exact = Exact(case, start, rows)
            part = slice(start, start + rows)
            for name in ("qg", "kg", "kr", "p", "t"):
                x = getattr(prepared, name)
                assert x.dtype == torch.bfloat16
                assert torch.isfinite(x[:, part]).all()
                width = 128 if name.endswith(("g", "r")) else rows
                assert relative_error(x[:, part, :width], getattr(exact, name)) < 3e-3, name
            for x in (prepared.p, prepared.t):
                assert not x[:, part, rows:].any()
                assert not x[:, part].triu(1).any()
            assert prepared.last.dtype == torch.float32
            torch.testing.assert_close(prepared.last[place].double(), exact.last, rtol=1e-3, atol=1e-37)

    def test_decays_are_cut_at_88(self, prepare, case, seqs, by_token):
        made = prepare(case.replace(g=torch.full_like(case.g, -1e4)), seqs)
        cut = prepare(case.replace(g=torch.full_like(case.g, -88.0)), seqs)
        made, cut = (by_token(x, seqs) for x in (made, cut))
        for name, x in made._asdict().items():
            if name != "plan":
                assert torch.isfinite(x).all()
                assert_bitwise_equal(name, x, getattr(cut, name))


class TestScan:
    def run(self, stages, case, seqs, prepared, **arguments):
        with poisoned_empty():
            return stages.scan(
                case.v, case.beta, prepared, seqs, initial_state=case.initial_state, **arguments
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
    def run(self, stages, case, seqs, prepared, **arguments):
        with poisoned_empty():
            return stages.adj(case.do, case.beta, prepared, seqs, dht=case.dht, **arguments)

    def test_adjoints_lie_in_their_slots(self, stages, logical, case, seqs, prepared):
        edge = case.dht is not None
        _, tape, dh0 = self.run(stages, case, seqs, prepared, need_dh0=True)
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
        y, tape, dh0 = self.run(stages, case, seqs, prepared)
        assert dh0 is None
        whole = self.run(stages, case, seqs, prepared, need_dh0=True)
        assert_bitwise_equal("y", y, whole[0])
        assert_bitwise_equal("adjoint states", tape, whole[1])
        assert (y.dtype, y.shape) == (torch.bfloat16, case.v.shape)

    def test_y_is_dv_before_beta(self, stages, case, seqs, prepared, truth):
        y, _, _ = self.run(stages, case, seqs, prepared)
        assert relative_error(case.beta[..., None] * y, truth(case)["dv"]) < 5e-3


def test_out_gives_what_the_op_gives(stages, case, seqs, prepared, call):
    edge = case.initial_state is not None
    with poisoned_empty():
        o, final, states = stages.scan(
            case.v,
            case.beta,
            prepared,
            seqs,
            initial_state=case.initial_state,
            output_final_state=edge,
            save_states=True,
        )
        y, adj_states, dh0 = stages.adj(case.do, case.beta, prepared, seqs, dht=case.dht, need_dh0=edge)
        dq, dk, dv, dbeta, dg, partials = stages.out(
            case.q,
            case.k,
            case.v,
            case.g,
            None,
            case.do,
            y,
            case.beta,
            prepared,
            states,
            adj_states,
            seqs,
            scale=SCALE,
            l2norm=True,
            states_edge=edge,
            adj_edge=edge,
        )
    assert partials is None
    got = {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}
    got |= {"ht": final, "dh0": dh0} if edge else {}
    expected = call(case)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(name, got[name], x)


@pytest.mark.parametrize("chunks", [1, 2, 128, 129, 1000])
def test_reduce(stages, device, chunks):
    partials = torch.randn(chunks, 3, 129, generator=torch.Generator().manual_seed(1)).to(device)
    da_log, dbias = stages.reduce(partials)
    assert (da_log.shape, dbias.shape) == ((3,), (3, 128))
    exact = partials.double().sum(0)
    assert relative_error(torch.cat([da_log[:, None], dbias], 1), exact) < 1e-6
