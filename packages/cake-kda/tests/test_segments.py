"""Calls that are cut into segments: errors, bits, and the stages that make the states between segments."""

from __future__ import annotations

import pytest
import torch

from cake.core import segments as planner
from cake.core import sequences
from cake.core.segments import plan_unseen
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _segments, _stages, chunk_kda, reference

LENGTHS = (200, 0, 64, 330, 30)
SCALE = 128**-0.5


@pytest.fixture
def cut_from(monkeypatch):
    """Lets plans cut sequences that are too short to be worth it."""
    monkeypatch.setattr(_segments, "RATES", planner.Cost(start=0, merge_start=0, merge=0, merge_octet=0))
    monkeypatch.setattr(planner, "LENGTHS", (2, 4))


class TestAccuracy:
    @pytest.mark.parametrize("count", [2, 100])
    @pytest.mark.parametrize("gate", ["ordinary", "model", "bounded", "mixed", "slow", 0.0, -0.02], ids=str)
    def test_gates(self, make, call, assert_accurate, gate, count):
        case = make(LENGTHS, heads=(1, 1), gate=gate, seed=5)
        with poisoned_empty():
            got = call(case, segments=count)
        assert_accurate(case, got, 1.6 if gate in (0.0, "slow", -0.02) else 1.0)

    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_without_states(self, make, call, assert_accurate, gate):
        case = make(LENGTHS, heads=(1, 2), gate=gate, state=False)
        with poisoned_empty():
            got = call(case, segments=3)
        assert_accurate(case, got, 1.6 if gate == 0.0 else 1.0)

    @pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=str)
    def test_heads(self, make, call, assert_accurate, heads):
        case = make((400, 130), heads=heads, gate=-0.05)
        assert_accurate(case, call(case, segments=3), 1.5)

    def test_a_batch(self, make, call, assert_accurate):
        case = make((300,), heads=(1, 2), batch=2, gate=-0.05)
        assert_accurate(case, call(case, segments=2), 1.5)

    @pytest.mark.parametrize("tokens", [129, 191, 192, 193, 257], ids="T{}".format)
    def test_short_last_segments(self, make, call, assert_accurate, tokens):
        case = make((tokens,), gate=-0.01)
        assert_accurate(case, call(case, segments=100), 1.6)

    def test_keys_without_norm(self, make, call, assert_accurate):
        # Nothing bounds the maps of long keys: none is taken to vanish.
        case = make((400,), l2norm=False, gate=-0.5)
        assert_accurate(case, call(case, segments=3))

    def test_beta_above_one(self, make, call, assert_accurate):
        case = make((400,), gate=-0.05)
        case = case.replace(beta=2 * case.beta)
        assert_accurate(case, call(case, segments=3), 1.6)

    def test_fast(self, make, call, assert_accurate):
        case = make((600,), gate="ordinary")
        assert_accurate(case, call(case, segments=4, variant="fast"))

    @pytest.mark.parametrize("which", ["o", "ht"])
    def test_a_loss_on_one_result(self, make, call, assert_accurate, which):
        case = make((300, 100), gate=-0.02)
        case = case.replace(dht=None) if which == "o" else case.replace(do=torch.zeros_like(case.do))
        got = call(case, segments=3, final=which == "ht")
        assert_accurate(case, got, 1.6, least_dg=0.02)

    @pytest.mark.parametrize("bound", [None, -5.0])
    def test_gates_in_the_call(self, make, device, bound):
        case = make((300, 130), heads=(1, 2))
        values = torch.Generator().manual_seed(1)
        a_log, bias, raw = (torch.randn(n, generator=values).to(device) for n in (2, 256, case.g.shape))

        def run(segments):
            given = [
                x.detach().requires_grad_() for x in (case.q, case.k, case.v, raw, case.beta, a_log, bias)
            ]
            o, _ = chunk_kda(
                *given[:5], A_log=given[5], dt_bias=given[6], use_gate_in_kernel=True, lower_bound=bound,
                safe_gate=bound is not None, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=case.boundaries,
                segments=segments,
            )  # fmt: skip
            return (o, *torch.autograd.grad(o, given, case.do))

        for cut, whole in zip(run(2), run(1), strict=True):
            assert relative_error(cut, whole) < 5e-3

    @pytest.mark.slow
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_long_and_slow(self, make, call, device, gate):
        """Heads and sequences one by one: whole and cut differ by their roundings, each off by half of it."""
        case = make((16384, 8192), heads=(1, 2), gate=gate)
        whole, cut = call(case, segments=1), call(case, segments=32)
        for name, x in cut.items():
            for head in range(x.shape[1] if name in ("ht", "dh0") else x.shape[2]):
                for n, (start, end) in enumerate(((0, 16384), (16384, 24576))):
                    part = (n, head) if name in ("ht", "dh0") else (0, slice(start, end), head)
                    assert relative_error(x[part], whole[name][part]) < 1.2e-2, (name, head, n)

    @pytest.mark.gpu
    @pytest.mark.parametrize("device", ["cuda"], indirect=True)
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_longer_and_slow(self, make, call, device, gate):
        # The recurrence would take minutes.
        case = make((131072,), heads=(1, 1), gate=gate)
        whole = call(case, segments=1)
        for name, x in call(case, segments=64).items():
            assert relative_error(x, whole[name]) < 1.2e-2, name


class TestBits:
    def test_one_segment_is_no_cut(self, make, call, assert_same_bits):
        case = make((200, 70))
        assert_same_bits(call(case, segments=1), call(case))

    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_whatever_is_kept(self, make, call, assert_same_bits, gate, state):
        case = make(LENGTHS, heads=(2, 4), gate=gate, state=state)
        saved = call(case, segments=3)
        with poisoned_empty():
            assert_same_bits(call(case, segments=3, recompute_state=True), saved)
            assert_same_bits(call(case, segments=3, disable_recompute=True), saved)
            assert_same_bits(call(case, segments=3), saved)

    def test_the_first_segments_are_the_same_walk(self, make, call):
        case = make((640,), gate=-0.001)
        whole, cut = call(case, segments=1), call(case, segments=2)
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

    @pytest.mark.gpu
    @pytest.mark.parametrize("device", ["cuda"], indirect=True)
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
    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_bits(self, make, call, assert_same_bits, as_known, gate, state):
        case = make((*LENGTHS, 0), heads=(2, 4), gate=gate, state=state)
        known = call(case)
        for dtype in (torch.int32, torch.int64):
            cu = torch.tensor(case.boundaries, dtype=dtype, device=case.q.device)
            with poisoned_empty():
                assert_same_bits(call(case, cu_seqlens=cu), known)
                assert_same_bits(call(case, cu_seqlens=cu, recompute_state=True), known)
                assert_same_bits(call(case, cu_seqlens=cu, disable_recompute=True), known)

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
        assert_accurate(case, call(case, cu_seqlens=cu), 1.6)
        assert made[0].length == plan_unseen(1300, 3, 2)
        assert_accurate(case, call(case, cu_seqlens=cu, segments=1), 1.6)
        assert len(made) == 1


class TestPlan:
    def plan(self, lengths, heads):
        seqs = sequences.packed((0, *torch.tensor(lengths).cumsum(0).tolist()), sum(lengths))
        return planner.cut_of_call(seqs, heads, None, False, rates=_segments.RATES)

    def test_long_sequences_of_few_heads_are_cut(self):
        # A snapshot: a change of any of these is a change of bits.
        assert self.plan((16384,) * 4, 4).n == 12
        assert self.plan((32768,), 2).n == 16
        assert self.plan((8192,), 16).n == 3

    def test_a_full_gpu_is_left_alone(self):
        assert self.plan((4096,) * 8, 64) is None
        assert self.plan((16384,), 64) is None

    def test_by_default(self, make, call, cut_from, monkeypatch, assert_accurate):
        made = []
        keep = planner.cut
        monkeypatch.setattr(planner, "cut", lambda *x: made.append(keep(*x)) or made[-1])
        case = make((600, 60), gate=-0.02)
        assert_accurate(case, call(case), 1.6)
        assert made[0].n > 2

    def test_refusals(self, make):
        case = make((100,))
        with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
            chunk_kda(case.q, case.k, case.v, case.g, case.beta, segments=0)


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
