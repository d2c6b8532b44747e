"""Calls that are cut into segments: errors, bits, and the stages that make the states between segments."""

from __future__ import annotations

import math

import pytest
import torch

from cake.core import segments as planner
from cake.core.segments import plan_unseen
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.gdn import _segments, _stages, chunk_gated_delta_rule, plan, reference

LENGTHS = (200, 0, 64, 330, 30)


@pytest.fixture
def cut_from(monkeypatch):
    """Lets plans cut sequences that are too short to be worth it."""
    monkeypatch.setattr(planner, "COST", planner.Cost(start=0, merge_start=0, merge=0, merge_octet=0))
    monkeypatch.setattr(planner, "LENGTHS", (2, 4))


class TestAccuracy:
    @pytest.mark.parametrize("count", [2, 100])
    @pytest.mark.parametrize("gate", ["ordinary", "model", "mixed", 0.0, -1e-4, -0.02, -1000.0], ids=str)
    def test_gates(self, make, call, assert_accurate, gate, count):
        case = make(LENGTHS, heads=(1, 1), gate=gate, seed=5)
        with poisoned_empty():
            got = call(case, segments=count)
        assert_accurate(case, got, 1.5 if gate in (0.0, -1e-4, -0.02) else 1.0)

    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_without_states(self, make, call, assert_accurate, gate):
        case = make(LENGTHS, heads=(1, 2), gate=gate, state=False)
        with poisoned_empty():
            got = call(case, segments=3)
        assert_accurate(case, got, 1.5 if gate == 0.0 else 1.0)

    @pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=str)
    def test_heads(self, make, call, assert_accurate, heads):
        case = make((400, 130), heads=heads, gate=-0.05)
        assert_accurate(case, call(case, segments=3))

    def test_a_batch(self, make, call, assert_accurate):
        case = make((300,), heads=(1, 2), batch=2, gate=-0.05)
        assert_accurate(case, call(case, segments=2))

    @pytest.mark.parametrize("tokens", [129, 191, 192, 193, 257], ids="T{}".format)
    def test_short_last_segments(self, make, call, assert_accurate, tokens):
        case = make((tokens,), gate=-0.01)
        # Almost no decay: dg is nearly one sum for all tokens, and so is its error.
        assert_accurate(case, call(case, segments=100), 1.5)

    def test_keys_without_norm(self, make, call, assert_accurate):
        # Nothing bounds the maps of long keys: none is taken to vanish.
        case = make((400,), l2norm=False, gate=-0.5)
        assert_accurate(case, call(case, segments=3))

    def test_beta_above_one(self, make, call, assert_accurate):
        case = make((400,), gate=-0.05)
        case = case.replace(beta=2 * case.beta)
        assert_accurate(case, call(case, segments=3), 1.5)

    def test_fast(self, make, call, assert_accurate):
        case = make((600,), gate="ordinary")
        assert_accurate(case, call(case, segments=4, variant="fast"))

    @pytest.mark.parametrize("which", ["o", "ht"])
    def test_a_loss_on_one_result(self, make, call, assert_accurate, which):
        case = make((300, 100), gate=-0.02)
        case = case.replace(dht=None) if which == "o" else case.replace(do=torch.zeros_like(case.do))
        got = call(case, segments=3, final=which == "ht")
        assert_accurate(case, got, least_dg=0.02)

    @pytest.mark.slow
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_long_and_slow(self, make, call, assert_accurate, device, gate):
        case = make((8192,), heads=(1, 1), gate=gate)
        assert_accurate(case, call(case, segments=32), 1.5)

    @pytest.mark.gpu
    @pytest.mark.parametrize("device", ["cuda"], indirect=True)
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_longer_and_slow(self, make, call, device, gate):
        # The recurrence would take minutes. Whole and cut differ by their roundings, each off by half of it.
        case = make((131072,), heads=(1, 1), gate=gate)
        whole = call(case, segments=1)
        for name, x in call(case, segments=64).items():
            assert relative_error(x, whole[name]) < 1e-2, name


class TestBits:
    def test_one_segment_is_no_cut(self, make, call, assert_same_bits):
        case = make((200, 70))
        assert_same_bits(call(case, segments=1), call(case))

    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_recomputed_states(self, make, call, assert_same_bits, gate, state):
        case = make(LENGTHS, heads=(2, 4), gate=gate, state=state)
        saved = call(case, segments=3, recompute_state=False)
        with poisoned_empty():
            assert_same_bits(call(case, segments=3, recompute_state=True), saved)
            assert_same_bits(call(case, segments=3), saved)

    def test_the_first_segments_are_the_same_walk(self, make, call, device):
        case = make((640,), gate=-0.001)
        whole, cut = call(case, segments=1), call(case, segments=2)
        assert_bitwise_equal("o", cut["o"][:, :320], whole["o"][:, :320])
        # The second one starts from the state that the pre-scan found: walked alike, from the same state.
        assert_bitwise_equal("o", cut["o"], whole["o"])

    def test_neighbours(self, make, call, cut_from):
        case = make((600, 200), heads=(1, 2))
        alone = case.map(lambda x: x)
        for name in ("q", "k", "v", "g", "beta", "do"):
            alone = alone.replace(**{name: getattr(case, name)[:, :600]})
        alone = alone.replace(boundaries=(0, 600), initial_state=case.initial_state[:1], dht=case.dht[:1])
        packed, single = call(case, packing_invariant=True), call(alone, packing_invariant=True)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert_bitwise_equal(name, packed[name][:, :600], single[name])
        for name in ("ht", "dh0"):
            assert_bitwise_equal(name, packed[name][:1], single[name])

    def test_zero_state_is_no_state(self, make, call, assert_same_bits):
        case = make((400, 130), heads=(2, 4), gate=-0.02, state=False)
        without = call(case, segments=3)
        zeros = case.q.new_zeros((2, 4, 128, 128), dtype=torch.float32)
        with_state = call(case.replace(initial_state=zeros), segments=3)
        del with_state["dh0"]
        assert_same_bits(with_state, without)

    def test_one_sequence_with_boundaries_on_the_device(self, make, call, assert_same_bits, device):
        case = make((600,), gate=-0.02)
        cu = torch.tensor(case.boundaries, device=device)
        assert_same_bits(call(case, cu_seqlens=cu, segments=4), call(case, segments=4))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
class TestCutOnTheDevice:
    """Boundaries that exist on the GPU alone: the same segments, made there, and so the same bits."""

    @pytest.fixture
    def length(self):
        return 2

    @pytest.fixture(autouse=True)
    def _unseen(self, length, monkeypatch):
        monkeypatch.setattr(planner, "plan_unseen", lambda *_: length)

    @pytest.fixture
    def as_known(self, length, monkeypatch):
        def plan_alike(counts, *_, **__):
            return tuple(max(1, -(-count // length)) for count in counts)

        monkeypatch.setattr(planner, "plan", plan_alike)

    @pytest.mark.parametrize("length", [2, 3, 100], ids="L{}".format)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_bits(self, make, call, assert_same_bits, as_known, gate, state, dtype):
        case = make((*LENGTHS, 0), heads=(2, 4), gate=gate, state=state)
        cu = torch.tensor(case.boundaries, dtype=dtype, device=case.q.device)
        known = call(case)
        with poisoned_empty():
            assert_same_bits(call(case, cu_seqlens=cu), known)
            assert_same_bits(call(case, cu_seqlens=cu, recompute_state=True), known)

    def test_many_sequences(self, make, call, assert_same_bits, as_known):
        lengths = tuple(1 + 37 * i % 200 for i in range(1300))
        case = make(lengths, heads=(1, 1), gate=-0.01, state=False)
        cu = torch.tensor(case.boundaries, device=case.q.device)
        assert_same_bits(call(case, cu_seqlens=cu), call(case))

    def test_by_default(self, make, call, assert_accurate, monkeypatch):
        monkeypatch.setattr(planner, "plan_unseen", plan_unseen)
        made = []
        keep = planner.cut_unseen
        monkeypatch.setattr(planner, "cut_unseen", lambda *x: made.append(keep(*x)) or made[-1])
        case = make((900, 100, 300), heads=(1, 2), gate=-0.01)
        cu = torch.tensor(case.boundaries, device=case.q.device)
        assert_accurate(case, call(case, cu_seqlens=cu))
        assert made[0].length == planner.plan_unseen(1300, 3, 2)
        assert_accurate(case, call(case, cu_seqlens=cu, segments=1))
        assert len(made) == 1

    def test_boundaries_that_do_not_fit_stay_inside(self, make, call):
        # Undefined results, but nothing outside the tensors is touched.
        case = make((900, 300), heads=(1, 1), state=False)
        for bounds in ([0, 1200, 0, 1200], [1200, 0, 1200], [0, 5000, 1200], [0, 10, 20]):
            cu = torch.tensor(bounds, device=case.q.device)
            call(case, cu_seqlens=cu)
            torch.cuda.synchronize()


class TestPlan:
    def test_long_sequences_of_few_heads_are_cut(self):
        assert planner.cut_of_call(plan.packed((0, 32768), 32768), 8, None, False).n == 16

    def test_a_full_gpu_is_left_alone(self):
        assert planner.cut_of_call(plan.batched(8, 4096), 64, None, False) is None

    def test_by_default(self, make, call, cut_from, monkeypatch, assert_accurate):
        made = []
        keep = planner.cut
        monkeypatch.setattr(planner, "cut", lambda *x: made.append(keep(*x)) or made[-1])
        case = make((600, 60), gate=-0.02)
        assert_accurate(case, call(case))
        assert made[0].n > 2

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

    def test_refusals(self, make):
        case = make((100,))
        with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
            chunk_gated_delta_rule(case.q, case.k, case.v, case.g, case.beta, segments=0)


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
