"""The maps of sequences and segments that others go on with, and walks of a part of a call's sequences."""

from __future__ import annotations

import pytest
import torch

from cake.core import segments as planner
from cake.core import sequences
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _stages, reference

LENGTHS = (300, 0, 64, 200, 30)
COUNTS = (3, 1, 1, 2, 1)
SCALE = 128**-0.5


@pytest.fixture
def device():
    return torch.device("cpu")  # where stages serve parts of a call


@pytest.fixture
def stages():
    return _stages.stages("torch")


@pytest.fixture(params=[0.0, -0.01, "ordinary"], ids=str)
def case(request, make):
    case = make(LENGTHS, heads=(1, 2), gate=request.param)
    g = case.g.clone()
    g[..., 1, :] *= 40  # heads of one call differ: some forget, some don't
    return case.replace(g=g)


@pytest.fixture
def seqs(case):
    return sequences.packed(case.boundaries, case.boundaries[-1])


@pytest.fixture
def prepared(stages, case, seqs):
    with poisoned_empty():
        return stages.prep(case.q, case.k, case.g, None, case.beta, seqs, scale=SCALE, l2norm=True)


def exact_map(case, start, end):
    """M and B of tokens start..end, in FP64 from the recurrence itself."""
    inputs = [x[:, start:end] for x in (case.q, case.k, case.v, case.g, case.beta)]
    b = reference.forward(*inputs)[1][0]
    unit = torch.eye(128).expand(1, 2, 128, 128).contiguous()
    inputs[2] = torch.zeros_like(inputs[2])
    return reference.forward(*inputs, initial_state=unit)[1][0], b


def exact_adjoint(case, start, end, leaving):
    """The adjoint that reaches token `start` from `leaving` after token `end`."""
    inputs = [x[:, start:end] for x in (case.q, case.k, case.v, case.g, case.beta)]
    zero = torch.zeros_like(case.initial_state[:1])
    return reference.backward(*inputs, case.do[:, start:end], leaving[None], initial_state=zero).dh0[0]


class TestTransfer:
    @pytest.mark.parametrize("least", [None, -20.0])
    def test_of_segments(self, stages, case, seqs, prepared, least):
        cut = planner.cut(seqs, COUNTS)
        with poisoned_empty():
            b, m, live = stages.transfer(
                case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
        for s, (start, end) in enumerate(cut.spans):
            if not cut.followed[s]:
                continue
            own, exact_b = exact_map(case, start, end)
            steps = case.g[0, start:end].double().split(64)
            slowest = sum(step.sum(0).amax(-1).clamp_min(-5) for step in steps)
            if not cut.opens[s]:
                assert not live[s].any()
                entering = case.initial_state[cut.sequence[s]].double()
                assert relative_error(b[s], own @ entering + exact_b) < 5e-3
                continue
            for head in range(2):
                assert bool(live[s, head]) == (least is None or bool(slowest[head] > least))
                if live[s, head]:
                    assert (m[s, head] - own[head]).norm() < 6e-3 * max(own[head].norm(), 1e-6)
                else:
                    assert not m[s, head].any()
            assert relative_error(b[s], exact_b) < 5e-3

    def test_of_a_selection(self, stages, case, seqs, prepared):
        chosen = seqs.select((3, 0))
        with poisoned_empty():
            b, m, live = stages.transfer(case.v, case.beta, prepared, chosen)
            back = stages.adj_transfer(case.do, case.beta, prepared, chosen, live)
        assert bool(live.all())
        for i, (start, end) in enumerate(chosen.spans):
            own, exact_b = exact_map(case, start, end)
            assert relative_error(b[i], exact_b) < 5e-3
            assert (m[i] - own).norm() < 6e-3 * max(own.norm(), 1e-6)
            assert relative_error(back[i], exact_adjoint(case, start, end, torch.zeros(2, 128, 128))) < 5e-3

    @pytest.mark.parametrize("least", [None, -20.0])
    def test_merged_states(self, stages, case, seqs, prepared, least):
        cut = planner.cut(seqs, COUNTS)
        with poisoned_empty():
            b, m, live = stages.transfer(
                case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
            entering = stages.merge(b, m, cut.chains, cut.n, live=live)
            back = stages.adj_transfer(case.do, case.beta, prepared, cut, live, dht=case.dht, least=least)
            leaving = stages.merge(back, m, cut.adjoint_chains, cut.n, live=live, transposed=True)
        for s, (start, end) in enumerate(cut.spans):
            n = cut.sequence[s]
            first, last = case.boundaries[n], case.boundaries[n + 1]
            if cut.opens[s]:
                own, exact_b = exact_map(case, first, start)
                exact = own @ case.initial_state[n].double() + exact_b
                assert relative_error(entering[s], exact) < 5e-3
            if cut.followed[s]:
                assert relative_error(leaving[s], exact_adjoint(case, end, last, case.dht[n])) < 5e-3


class TestWalks:
    def test_of_segments(self, stages, case, seqs, prepared):
        """Walked piece by piece from the right states, a call gives what it gives whole."""
        cut = planner.cut(seqs, COUNTS)
        with poisoned_empty():
            b, m, live = stages.transfer(case.v, case.beta, prepared, cut, initial_state=case.initial_state)
            entering = stages.merge(b, m, cut.chains, cut.n, live=live)
            o, final, _ = stages.scan(
                case.v,
                case.beta,
                prepared,
                cut,
                initial_state=case.initial_state,
                entering=entering,
                output_final_state=True,
            )
            whole, whole_final, _ = stages.scan(
                case.v,
                case.beta,
                prepared,
                seqs,
                initial_state=case.initial_state,
                output_final_state=True,
            )
        assert relative_error(o, whole) < 5e-3
        assert relative_error(final, whole_final) < 5e-3
        assert_bitwise_equal("final state of a whole sequence", final[2], whole_final[2])

    @pytest.mark.parametrize("edge", [False, True], ids=["no-state", "state"])
    def test_of_a_selection(self, stages, case, seqs, prepared, edge):
        """Selections that together hold every sequence give the call's bits, whichever order they come in."""
        state, dht = (case.initial_state, case.dht) if edge else (None, None)
        inputs = (case.q, case.k, case.v, case.g, None)
        edges = {"scale": SCALE, "l2norm": True, "states_edge": edge, "adj_edge": edge}

        def walk(chosen, ids, o=None, y=None, into=None):
            def rows(x):
                return None if x is None else x[list(ids)]

            with poisoned_empty():
                o, final, states = stages.scan(
                    case.v,
                    case.beta,
                    prepared,
                    chosen,
                    initial_state=rows(state),
                    output_final_state=True,
                    save_states=True,
                    o=o,
                )
                y, adj_states, dh0 = stages.adj(
                    case.do, case.beta, prepared, chosen, dht=rows(dht), need_dh0=True, y=y
                )
                *gradients, _ = stages.out(
                    *inputs, case.do, y, case.beta, prepared, states, adj_states, chosen, **edges, into=into
                )
            return (o, y, *gradients), (final, dh0)

        everything, ends = walk(seqs, range(seqs.n))
        with poisoned_empty():
            parts = [torch.empty_like(x) for x in everything]
        for ids in ((3, 1, 0), (2, 4)):
            got, own_ends = walk(seqs.select(ids), ids, parts[0], parts[1], tuple(parts[2:]))
            assert all(a is b for a, b in zip(got, parts, strict=True))
            for name, a, b in zip(("final state", "dh0"), own_ends, ends, strict=True):
                assert_bitwise_equal(name, a, b[list(ids)])
        for i, (a, b) in enumerate(zip(parts, everything, strict=True)):
            assert_bitwise_equal(f"result {i}", a, b)
