"""Plans of calls that are cut into segments, and the stages that make the states between segments."""

from __future__ import annotations

import math

import pytest
import torch

from cake.core import segments as planner
from cake.core.testing import poisoned_empty, relative_error
from cake.gdn import _segments, _stages, plan, reference

LENGTHS = (200, 0, 64, 330, 30)


class TestPlan:
    def test_long_sequences_of_few_heads_are_cut(self):
        assert _segments.cut_of_call(plan.packed((0, 32768), 32768), 8, None, False).n == 16

    def test_a_full_gpu_is_left_alone(self):
        assert _segments.cut_of_call(plan.batched(8, 4096), 64, None, False) is None

    @pytest.mark.parametrize("name", ["segments", "packing_invariant"])
    def test_boundaries_must_be_known(self, name):
        seqs = plan.packed_on_device(torch.tensor([0, 100, 600]), 600)
        arguments = {"segments": 2} if name == "segments" else {"packing_invariant": True}
        full = {"segments": None, "packing_invariant": False} | arguments
        with pytest.raises(ValueError, match=f"{name} needs the boundaries on the host"):
            planner.cut_of_call(seqs, 2, **full)
        assert planner.cut_of_call(seqs, 2, None, False) is None
        seqs = plan.packed_on_device(torch.tensor([0, 100, 60000]), 60000)
        assert planner.cut_of_call(seqs, 2, None, False).length == 16
        assert planner.cut_of_call(seqs, 2, 1, False) is None


class TestStages:
    """The states between segments, against the FP64 recurrence."""

    @pytest.fixture(params=[0.0, -0.01, "ordinary"], ids=str)
    def case(self, request, make):
        case = make(LENGTHS, heads=(2, 4), gate=request.param)
        # Heads of one call differ: some forget, some don't.
        g = case.g.clone()
        g[..., 1] *= 40
        g[..., 2] *= 0.1
        return case.replace(g=g)

    @pytest.fixture
    def stages(self, device):
        return _stages.stages(_stages.backend_name(device))

    @pytest.fixture
    def cut(self, case):
        return planner.cut(plan.packed(case.boundaries, case.boundaries[-1]), (3, 1, 1, 4, 1))

    @pytest.fixture
    def prepared(self, stages, case, cut):
        with poisoned_empty():
            return stages.prep(case.k, case.g, case.beta, cut, l2norm=True)

    def exact_map(self, case, start, end):
        """M and B of tokens start..end, in FP64 from the recurrence itself."""
        part = slice(start, end)
        inputs = [x[:, part] for x in (case.q, case.k, case.v, case.g, case.beta)]
        b = reference.forward(*inputs)[1][0]
        unit = torch.eye(128, device=case.q.device).expand(1, 4, 128, 128).contiguous()
        inputs[2] = torch.zeros_like(inputs[2])
        return reference.forward(*inputs, initial_state=unit)[1][0], b

    @pytest.mark.parametrize("least", [None, -20.0])
    def test_transfer(self, stages, case, cut, prepared, least):
        with poisoned_empty():
            b, m, live = stages.transfer(
                case.k, case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
        for s, (start, end) in enumerate(cut.spans):
            if not cut.followed[s]:
                continue
            own, exact_b = self.exact_map(case, start, end)
            decay = case.g[0, start:end].double().sum(0)
            if cut.opens[s]:
                for head in range(4):
                    assert bool(live[s, head]) == (least is None or bool(decay[head] > least))
                    if live[s, head]:
                        error = (m[s, head] - own[head]).norm()
                        assert error < 4e-3 * max(own[head].norm(), 1e-6)
                    else:
                        assert not m[s, head].any()
                assert relative_error(b[s], exact_b) < 5e-3
            else:
                assert not live[s].any()
                entering = case.initial_state[cut.sequence[s]].double()
                assert relative_error(b[s], own @ entering + exact_b) < 5e-3

    def test_a_map_is_better_than_one_rounding(self, stages, device, make):
        # Without T's rounding, and in FP64, the same chunk-wise map: what is left is the operands' rounding.
        case = make((64 * 40,), heads=(1, 1), gate=0.0, beta=1e-3)
        seqs = plan.packed(case.boundaries, case.boundaries[-1])
        cut = planner.cut(seqs, (40,))
        prepared = stages.prep(case.k, case.g, case.beta, cut, l2norm=True)
        _, m, _ = stages.transfer(case.k, case.v, case.beta, prepared, cut)
        t, rk = prepared.t.double(), prepared.rk.double()
        unit = torch.eye(128, device=device, dtype=torch.float64)
        keys = case.k[0, :, 0].double() * rk[0][:, None]
        for s in range(1, 39):
            part = slice(64 * s, 64 * s + 64)
            k = keys[part]
            exact = unit - k.T @ t[0, part] @ (1e-3 * k)
            # Tensor cores cut off the last bit where they add to 1, which M - 1 feels; one bf16 is 2e-3.
            limit = 1e-3 if device.type == "cuda" else 1e-4
            assert relative_error(m[s, 0] - unit, exact - unit) < limit

    @pytest.mark.parametrize("least", [None, -20.0])
    def test_merged_states(self, stages, case, cut, prepared, least):
        with poisoned_empty():
            states, _, _ = _segments.entering(
                stages, case.k, case.v, case.beta, prepared, cut, case.initial_state, least
            )
        for s, (start, _) in enumerate(cut.spans):
            if not cut.opens[s]:
                continue
            n = cut.sequence[s]
            first = case.boundaries[n]
            inputs = [x[:, first:start] for x in (case.q, case.k, case.v, case.g, case.beta)]
            _, exact = reference.forward(*inputs, initial_state=case.initial_state[n : n + 1])
            assert relative_error(states[s], exact[0]) < 5e-3

    @pytest.mark.parametrize("least", [None, -20.0])
    def test_merged_adjoints(self, stages, case, cut, prepared, least):
        with poisoned_empty():
            _, m, live = stages.transfer(
                case.k, case.v, case.beta, prepared, cut, initial_state=case.initial_state, least=least
            )
            states = _segments.leaving(
                stages,
                case.q,
                case.k,
                case.do,
                case.beta,
                prepared,
                cut,
                (m, live),
                case.dht,
                128**-0.5,
                True,
                least,
            )
        for s, (_, end) in enumerate(cut.spans):
            if not cut.followed[s]:
                continue
            n = cut.sequence[s]
            part = slice(end, case.boundaries[n + 1])
            inputs = [x[:, part] for x in (case.q, case.k, case.v, case.g, case.beta)]
            zero = torch.zeros_like(case.initial_state[:1])
            exact = reference.backward(*inputs, case.do[:, part], case.dht[n : n + 1], initial_state=zero).dh0
            assert relative_error(states[s], exact[0]) < 5e-3


def test_thresholds():
    # e^-20 of a state is less than fp32 sees beside the state's own rounding; fast may look less far.
    assert math.exp(_segments.LEAST["det"]) < 2**-24 / 16
    assert _segments.LEAST["fast"] > _segments.LEAST["det"]
