"""Plans of calls that are cut into segments, and the stages that make the states between segments."""

from __future__ import annotations

import pytest
import torch

from cake.core import segments as planner
from cake.core import sequences
from cake.core.testing import poisoned_empty, relative_error
from cake.kda import _segments, _stages, reference

LENGTHS = (200, 0, 64, 330, 30)
SCALE = 128**-0.5


class TestPlan:
    def plan(self, lengths, heads):
        seqs = sequences.packed((0, *torch.tensor(lengths).cumsum(0).tolist()), sum(lengths))
        return planner.cut_of_call(seqs, heads, None, False, rates=_segments.RATES)

    def test_long_sequences_of_few_heads_are_cut(self):
        # A snapshot: a change of any of these is a change of bits.
        assert self.plan((16384,) * 4, 4).n == 32
        assert self.plan((32768,), 2).n == 32
        assert self.plan((8192,), 16).n == 4

    def test_a_full_gpu_is_left_alone(self):
        assert self.plan((4096,) * 8, 64) is None
        assert self.plan((16384,), 64) is None


class TestStages:
    """The states between segments, against the FP64 recurrence."""

    @pytest.fixture(params=[0.0, -0.01, "ordinary"], ids=str)
    def case(self, request, make):
        case = make(LENGTHS, heads=(2, 4), gate=request.param)
        # Heads of one call differ: some forget, some don't.
        g = case.g.clone()
        g[..., 1, :] *= 40
        g[..., 2, :] *= 0.1
        return case.replace(g=g)

    @pytest.fixture
    def stages(self, device):
        return _stages.stages(_stages.backend_name(device, None))

    @pytest.fixture
    def cut(self, case):
        return planner.cut(sequences.packed(case.boundaries, case.boundaries[-1]), (3, 1, 1, 4, 1))

    @pytest.fixture
    def prepared(self, stages, case, cut):
        with poisoned_empty():
            return stages.prep(case.q, case.k, case.g, None, case.beta, cut, scale=SCALE, l2norm=True)

    def exact_map(self, case, start, end):
        """M and B of tokens start..end, in FP64 from the recurrence itself."""
        part = slice(start, end)
        inputs = [x[:, part] for x in (case.q, case.k, case.v, case.g, case.beta)]
        b = reference.forward(*inputs)[1][0]
        unit = torch.eye(128, device=case.q.device).expand(1, 4, 128, 128).contiguous()
        inputs[2] = torch.zeros_like(inputs[2])
        return reference.forward(*inputs, initial_state=unit)[1][0], b

    @pytest.mark.parametrize("least", [None, -10.0])
    def test_transfer(self, stages, case, cut, prepared, least):
        with poisoned_empty():
            b, m, live = stages.transfer(
                case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
        for s, (start, end) in enumerate(cut.spans):
            if not cut.followed[s]:
                continue
            own, exact_b = self.exact_map(case, start, end)
            if not cut.opens[s]:
                assert not live[s].any()
                entering = case.initial_state[cut.sequence[s]].double()
                assert relative_error(b[s], own @ entering + exact_b) < 5e-3
                continue
            steps = case.g[0, start:end].double().split(64)
            decay = sum(step.sum(0).amax(-1).clamp_min(-5) for step in steps)
            for head in range(4):
                assert bool(live[s, head]) == (least is None or bool(decay[head] > least))
                if live[s, head]:
                    error = (m[s, head] - own[head]).norm()
                    assert error < 6e-3 * max(own[head].norm(), 1e-6)
                else:
                    assert not m[s, head].any()
            assert relative_error(b[s], exact_b) < 5e-3

    @pytest.mark.parametrize("least", [None, -10.0])
    def test_merged_states(self, stages, case, cut, prepared, least):
        with poisoned_empty():
            b, m, live = stages.transfer(
                case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
            entering = stages.chain(b, m, live, prepared, cut)
            back = stages.adj_transfer(case.do, case.beta, prepared, cut, live, dht=case.dht, least=least)
            leaving = stages.chain(back, m, live, prepared, cut, adjoint=True)
        for s, (start, end) in enumerate(cut.spans):
            n = cut.sequence[s]
            state, dht = case.initial_state[n : n + 1], case.dht[n : n + 1]
            if cut.opens[s]:
                before = slice(case.boundaries[n], start)
                inputs = [x[:, before] for x in (case.q, case.k, case.v, case.g, case.beta)]
                exact = reference.forward(*inputs, initial_state=state)[1]
                assert relative_error(entering[s], exact[0]) < 5e-3
            if cut.followed[s]:
                after = slice(end, case.boundaries[n + 1])
                inputs = [x[:, after] for x in (case.q, case.k, case.v, case.g, case.beta)]
                exact = reference.backward(*inputs, case.do[:, after], dht, initial_state=0 * state).dh0
                assert relative_error(leaving[s], exact[0]) < 5e-3

    def test_decays_that_states_evade(self, stages, make):
        # Every channel is emptied now and then: nothing stays where it is for a chunk, but some moves on.
        case = make((640,), heads=(1, 2), state=False)
        hits = torch.rand(case.g.shape, generator=torch.Generator().manual_seed(3)) < 0.12
        case = case.replace(g=torch.where(hits.to(case.g.device), -88.0, -0.001))
        cut = planner.cut(sequences.packed((0, 640), 640), (2,))
        prepared = stages.prep(case.q, case.k, case.g, None, case.beta, cut, scale=SCALE, l2norm=True)
        b, m, live = stages.transfer(case.v, case.beta, prepared, cut, least=-20.0)
        back = stages.adj_transfer(case.do, case.beta, prepared, cut, live, least=-20.0)
        inputs = (case.q, case.k, case.v, case.g, case.beta)
        exact = reference.forward(*(x[:, :320] for x in inputs))[1][0]
        assert relative_error(stages.chain(b, m, live, prepared, cut)[1], exact) < 5e-3
        after = [x[:, 320:] for x in (*inputs, case.do)]
        exact = reference.backward(*after, None, initial_state=torch.zeros_like(b[:1])).dh0[0]
        assert relative_error(stages.chain(back, m, live, prepared, cut, adjoint=True)[0], exact) < 5e-3
