"""Calls that are cut into segments: errors and bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from cake.core import segments as planner
from cake.core.segments import choice_unseen
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error

LENGTHS = (200, 0, 64, 330, 30)
# Of the limits for whole calls: where little decays, what a segment's map rounds off stays to the end.
WEAK = {"gdn": 1.5, "kda": 1.6}  # next to no decay
MILD = {"gdn": 1.0, "kda": 1.6}
GATES = {
    "gdn": ["ordinary", "model", "mixed", 0.0, -1e-4, -0.02, -1000.0],
    "kda": ["ordinary", "model", "bounded", "mixed", "slow", 0.0, -0.02],
}


@pytest.fixture
def cut_from(op, monkeypatch):
    """Lets plans cut sequences that are too short to be worth it."""
    free = planner.Cost(start=0, merge_start=0, merge=0, merge_octet=0)
    monkeypatch.setattr(op.module("_segments"), "RATES", free)
    monkeypatch.setattr(planner, "LENGTHS", (2, 4))


class TestAccuracy:
    @pytest.mark.parametrize("count", [2, 100])
    @pytest.mark.parametrize(
        ("op", "gate"),
        [(op, gate) for op, gates in GATES.items() for gate in gates],
        indirect=["op"],
        ids=str,
    )
    def test_gates(self, op, make, call, assert_accurate, gate, count):
        case = make(LENGTHS, heads=(1, 1), gate=gate, seed=5)
        with poisoned_empty():
            got = call(case, segments=count)
        assert_accurate(case, got, WEAK[op.name] if gate in (0.0, -1e-4, "slow", -0.02) else 1.0)

    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_without_states(self, op, make, call, assert_accurate, gate):
        case = make(LENGTHS, heads=(1, 2), gate=gate, state=False)
        with poisoned_empty():
            got = call(case, segments=3)
        assert_accurate(case, got, WEAK[op.name] if gate == 0.0 else 1.0)

    @pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)], ids=str)
    def test_heads(self, op, make, call, assert_accurate, heads):
        case = make((400, 130), heads=heads, gate=-0.05)
        assert_accurate(case, call(case, segments=3), MILD[op.name])

    def test_a_batch(self, op, make, call, assert_accurate):
        case = make((300,), heads=(1, 2), batch=2, gate=-0.05)
        assert_accurate(case, call(case, segments=2), MILD[op.name])

    @pytest.mark.parametrize("tokens", [129, 191, 192, 193, 257], ids="T{}".format)
    def test_short_last_segments(self, op, make, call, assert_accurate, tokens):
        case = make((tokens,), gate=-0.01)
        # Almost no decay: dg is nearly one sum for all tokens, and so is its error.
        assert_accurate(case, call(case, segments=100), WEAK[op.name])

    def test_keys_without_norm(self, make, call, assert_accurate):
        # Nothing bounds the maps of long keys: none is taken to vanish.
        case = make((400,), l2norm=False, gate=-0.5)
        assert_accurate(case, call(case, segments=3))

    def test_beta_above_one(self, op, make, call, assert_accurate):
        case = make((400,), gate=-0.05)
        case = case.replace(beta=2 * case.beta)
        assert_accurate(case, call(case, segments=3), WEAK[op.name])

    def test_fast(self, make, call, assert_accurate):
        case = make((600,), gate="ordinary")
        assert_accurate(case, call(case, segments=4, variant="fast"))

    @pytest.mark.parametrize("which", ["o", "ht"])
    def test_a_loss_on_one_result(self, op, make, call, assert_accurate, which):
        case = make((300, 100), gate=-0.02)
        case = case.replace(dht=None) if which == "o" else case.replace(do=torch.zeros_like(case.do))
        got = call(case, segments=3, final=which == "ht")
        assert_accurate(case, got, MILD[op.name], least_dg=0.02)

    @pytest.mark.parametrize(("op", "bound"), [("gdn", None), ("kda", None), ("kda", -5.0)], indirect=["op"])
    def test_gates_in_the_call(self, op, make, device, bound):
        case = make((300, 130), heads=(1, 2))
        values = torch.Generator().manual_seed(1)
        shapes = (2, (2, *case.g.shape[3:]), case.g.shape)
        a_log, bias, raw = (torch.randn(shape, generator=values).to(device) for shape in shapes)
        bounds = {} if bound is None else {"lower_bound": bound, "safe_gate": True}

        def run(segments):
            given = [
                x.detach().requires_grad_() for x in (case.q, case.k, case.v, raw, case.beta, a_log, bias)
            ]
            o, _ = op.chunk(
                *given[:5], A_log=given[5], dt_bias=given[6], use_gate_in_kernel=True, segments=segments,
                use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=case.boundaries, **bounds,
            )  # fmt: skip
            return (o, *torch.autograd.grad(o, given, case.do))

        for cut, whole in zip(run(2), run(1), strict=True):
            assert relative_error(cut, whole) < 5e-3

    @pytest.mark.slow
    @pytest.mark.parametrize("op", ["gdn"], indirect=True)
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_long_and_slow(self, make, call, assert_accurate, gate):
        case = make((8192,), heads=(1, 1), gate=gate)
        assert_accurate(case, call(case, segments=32), WEAK["gdn"])

    @pytest.mark.slow
    @pytest.mark.parametrize("op", ["kda"], indirect=True)
    @pytest.mark.parametrize("gate", [0.0, -1e-4], ids=str)
    def test_long_and_slow_cut_and_whole(self, make, call, gate):
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
    def test_longer_and_slow(self, op, make, call, device, gate):
        # The recurrence would take minutes. Whole and cut differ by their roundings, each off by half of it.
        case = make((131072,), heads=(1, 1), gate=gate)
        whole, limit = call(case, segments=1), 1e-2 if op.name == "gdn" else 1.2e-2
        for name, x in call(case, segments=64).items():
            assert relative_error(x, whole[name]) < limit, name


class TestBits:
    def test_one_segment_is_no_cut(self, make, call, assert_same_bits):
        case = make((200, 70))
        assert_same_bits(call(case, segments=1), call(case))

    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_whatever_is_kept(self, op, make, call, assert_same_bits, gate, state):
        case = make(LENGTHS, heads=(2, 4), gate=gate, state=state)
        saved = call(case, segments=3)
        with poisoned_empty():
            for tape in op.own.TAPES.values():
                assert_same_bits(call(case, segments=3, **tape), saved)

    def test_the_first_segments_are_the_same_walk(self, make, call):
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
        monkeypatch.setattr(planner, "CHOSEN_SEQUENCES", 0)

    @pytest.fixture
    def as_known(self, length, monkeypatch):
        def plan_alike(counts, *_, **__):
            return tuple(max(1, -(-count // length)) for count in counts)

        monkeypatch.setattr(planner, "plan", plan_alike)

    @pytest.mark.parametrize("length", [2, 3, 100], ids="L{}".format)
    @pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
    @pytest.mark.parametrize("gate", ["ordinary", 0.0], ids=str)
    def test_bits(self, op, make, call, assert_same_bits, as_known, gate, state):
        case = make((*LENGTHS, 0), heads=(2, 4), gate=gate, state=state)
        known = call(case)
        for dtype in (torch.int32, torch.int64):
            cu = torch.tensor(case.boundaries, dtype=dtype, device=case.q.device)
            for tape in op.own.TAPES.values():
                with poisoned_empty():
                    assert_same_bits(call(case, cu_seqlens=cu, **tape), known)

    def test_many_sequences(self, make, call, assert_same_bits, as_known):
        lengths = tuple(1 + 37 * i % 200 for i in range(1300))
        case = make(lengths, heads=(1, 1), gate=-0.01, state=False)
        cu = torch.tensor(case.boundaries, device=case.q.device)
        assert_same_bits(call(case, cu_seqlens=cu), call(case))

    def test_chosen(self, op, make, call, assert_same_bits, monkeypatch):
        choice = choice_unseen(2800, 4, 2)
        monkeypatch.setattr(planner, "CHOSEN_SEQUENCES", 4)
        monkeypatch.setattr(planner, "choice_unseen", lambda *_, **__: choice)
        case = make((2000, 0, 100, 700), heads=(1, 2), gate=-0.01)
        counts = choice.plan([-(-(b - a) // 64) for a, b in itertools.pairwise(case.boundaries)])
        assert counts[0] > 1
        monkeypatch.setattr(planner, "plan", lambda *_, **__: counts)
        cu = torch.tensor(case.boundaries, device=case.q.device)
        for tape in op.own.TAPES.values():
            assert_same_bits(call(case, cu_seqlens=cu, **tape), call(case))

    def test_by_default(self, op, make, call, assert_accurate, monkeypatch):
        monkeypatch.setattr(planner, "CHOSEN_SEQUENCES", 3)
        made = []
        keep = planner.cut_unseen
        monkeypatch.setattr(planner, "cut_unseen", lambda *x: made.append(keep(*x)) or made[-1])
        case = make((1900, 100, 300), heads=(1, 2), gate=-0.01)
        cu = torch.tensor(case.boundaries, device=case.q.device)
        assert_accurate(case, call(case, cu_seqlens=cu), MILD[op.name])
        assert made[0].choice.lengths == choice_unseen(2300, 3, 2).lengths
        assert_accurate(case, call(case, cu_seqlens=cu, segments=1), MILD[op.name])
        assert len(made) == 1

    @pytest.mark.parametrize("op", ["gdn"], indirect=True)
    def test_boundaries_that_do_not_fit_stay_inside(self, make, call):
        # Undefined results, but nothing outside the tensors is touched.
        case = make((900, 300), heads=(1, 1), state=False)
        for bounds in ([0, 1200, 0, 1200], [1200, 0, 1200], [0, 5000, 1200], [0, 10, 20]):
            cu = torch.tensor(bounds, device=case.q.device)
            call(case, cu_seqlens=cu)
            torch.cuda.synchronize()


class TestPlan:
    def test_by_default(self, op, make, call, cut_from, monkeypatch, assert_accurate):
        made = []
        keep = planner.cut
        monkeypatch.setattr(planner, "cut", lambda *x: made.append(keep(*x)) or made[-1])
        case = make((600, 60), gate=-0.02)
        assert_accurate(case, call(case), MILD[op.name])
        assert made[0].n > 2

    def test_refusals(self, op, make):
        case = make((100,))
        with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
            op.chunk(case.q, case.k, case.v, case.g, case.beta, segments=0)
