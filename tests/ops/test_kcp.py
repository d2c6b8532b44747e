"""Calls under a context: packs over several ranks against the FP64 recurrence over all of their tokens."""

from __future__ import annotations

import random
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cake.core import cp, entry, op_spec
from cake.core.cp import _exchange, _joint, build_kcp_context
from cake.core.testing import Limit, Ranks, assert_bitwise_equal, assert_within, error_report

LIMITS = {"o": 5e-3, "dq": 6e-3, "dk": 6e-3, "dv": 6e-3, "dg": 6e-3, "dbeta": 6e-3}
WORLDS = (1, 2, 3, 4)
#: Every number of tokens here divides by the ranks of each world, twice over.
PACKS = {
    "one document": (0, 240),
    "ends on borders": (0, 60, 60, 120, 180, 240),
    "short ones": (0, 0, 3, 58, 61, 62, 119, 122, 122, 177, 240, 240),
    "long and short": (0, 7, 230, 240),
}


class Calls:
    """What a rank calls: it knows its op by name."""

    def __init__(self, name):
        names = sorted(op_spec(name).entry_points)
        self.chunk, self.kcp_chunk = (entry(name, entry_point) for entry_point in names)
        self.package = import_module(f"cake.{name}")
        self.torch = import_module(f"cake.{name}._torch")


def part(group, name, tensors, bounds, how, options):
    """One rank's forward and backward: results of its tokens, in local order.

    The option `joint` has the stages walk all sequences at once, as kernels do; "cut": every chunk by itself.
    """
    options = dict(options)
    joint = options.pop("joint", False)
    op, context = Calls(name), build_kcp_context(bounds, group, **how)
    inputs = {name: context.shard(x).detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    with pytest.MonkeyPatch().context() as change:
        change.setattr(op.torch, "SELECTIONS", not joint)
        if joint == "cut":
            change.setattr(_joint, "MOST_CHUNKS", 1)
        o, none = op.kcp_chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True, **options)
        assert none is None
        gradients = torch.autograd.grad(o, list(inputs.values()), context.shard(tensors["do"]))
    names = ["o", *(f"d{name}" for name in inputs)]
    results = dict(zip(names, (o.detach(), *gradients), strict=True))
    return results, context.fragments, context.boundaries, str(op.package.last_route())


def gather(parts, total):
    """Tensors over all tokens from every rank's own."""
    whole = {}
    for results, fragments, _, _ in parts:
        for name, x in results.items():
            into = whole.setdefault(name, x.new_full((1, total, *x.shape[2:]), float("nan")))
            first = 0
            for start, end in fragments:
                into[:, start:end] = x[:, first : first + end - start]
                first += end - start
    return whole


@pytest.fixture(scope="module")
def pool():
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture
def ranks(pool, op):
    """The pool, with the op's name before the arguments of what it runs."""
    return SimpleNamespace(
        run=lambda function, *arguments, **how: pool.run(function, op.name, *arguments, **how),
        values=lambda function, *arguments, **how: pool.values(function, op.name, *arguments, **how),
    )


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture
def tensors(make):
    def of(bounds, heads=(1, 2), **options):
        lengths = [end - start for start, end in pairwise(bounds)]
        case = make(lengths, heads=heads, state=False, **options)
        return case, {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "do")}

    return of


@pytest.fixture
def assert_accurate(op, truth):
    """Every rank's fragments and every head by itself against the recurrence over the whole pack."""

    def check(case, parts, slack=1.0):
        got = gather(parts, case.q.shape[1])
        expected = {name: x for name, x in truth(case).items() if name in got}
        edges = sorted({edge for _, fragments, _, _ in parts for span in fragments for edge in span})
        for head in range(case.v.shape[2]):
            heads = {name: min(head, x.shape[2] - 1) for name, x in got.items()}
            report = error_report(
                {name: x[:, :, heads[name]] for name, x in got.items()},
                {name: x[:, :, heads[name]] for name, x in expected.items()},
                boundaries=edges,
                least_rms={"dg": op.own.ORDINARY_DG},
                block_floor=1.0,
            )
            # Under slow decay dg of a few tokens of one head is nearly one sum, and all its error is alike.
            parts_of = {name: 4.0 if name == "dg" else 2.0 for name in got}
            limits = {name: slack * LIMITS[name] for name in got}
            assert_within(
                report, {name: Limit(1.5 * x, parts_of[name] * x, 4 * x) for name, x in limits.items()}
            )

    return check


class TestAccuracy:
    @pytest.mark.parametrize("pack", PACKS)
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_worlds_and_layouts(self, ranks, tensors, assert_accurate, layout, pack):
        for world, heads in zip(WORLDS, [(1, 1), (2, 4), (1, 5), (4, 4)], strict=True):
            case, given = tensors(PACKS[pack], heads=heads, gate="ordinary" if world == 2 else -0.01)
            assert_accurate(case, ranks.values(part, given, PACKS[pack], {"layout": layout}, {}, world=world))

    @pytest.mark.parametrize("world", WORLDS)
    def test_zigzag_per_document(self, ranks, tensors, assert_accurate, world):
        bounds = (0, 24, 24, 144, 192)
        case, given = tensors(bounds, heads=(2, 4))
        how = {"layout": "zigzag_per_document"}
        assert_accurate(case, ranks.values(part, given, bounds, how, {}, world=world))

    @pytest.mark.parametrize("world", WORLDS)
    def test_any_fragments(self, ranks, tensors, assert_accurate, world):
        bounds = (0, 7, 150, 150, 231, 240)
        cuts = [0, 5, 64, 70, 71, 130, 200, 231, 240]
        pieces = list(pairwise(cuts))
        random.Random(world).shuffle(pieces)
        fragments = [pieces[rank::world] for rank in range(world)]
        case, given = tensors(bounds, heads=(2, 2), gate=-0.02)
        assert_accurate(case, ranks.values(part, given, bounds, {"fragments": fragments}, {}, world=world))

    @pytest.mark.parametrize("pack", ["one document", "short ones"])
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_all_sequences_at_once(self, ranks, tensors, assert_accurate, layout, pack):
        bounds = PACKS[pack]
        for world, heads in zip(WORLDS[1:], [(1, 1), (2, 4), (2, 2)], strict=True):
            case, given = tensors(bounds, heads=heads, gate="ordinary" if world == 2 else -0.01)
            how = {"layout": layout}
            for options in ({"joint": True, "recompute_state": True}, {"joint": "cut"}):
                parts = ranks.values(part, given, bounds, how, options, world=world)
                assert_accurate(case, parts)

    @pytest.mark.parametrize("joint", [False, True])
    def test_a_rank_without_tokens(self, ranks, tensors, assert_accurate, joint):
        bounds = (0, 10, 200)
        case, given = tensors(bounds)
        how = {"fragments": [[(0, 90)], [], [(90, 200)]]}
        parts = ranks.values(part, given, bounds, how, {"joint": joint}, world=3)
        assert parts[1][0]["dq"].shape == (1, 0, 1, 128)
        assert_accurate(case, parts)

    @pytest.mark.parametrize("gate", [0.0, "slow", "model", "mixed"], ids=str)
    def test_gates(self, ranks, tensors, assert_accurate, gate):
        # Without decay nothing that entered is ever forgotten: every rank's map counts in full.
        bounds = (0, 1024)
        case, given = tensors(bounds, heads=(1, 2), gate=gate, beta="half ones")
        parts = ranks.values(part, given, bounds, {}, {})
        assert_accurate(case, parts, 1.0 if gate in ("model", "mixed") else 1.6)

    def test_gates_in_the_call(self, op, ranks, tensors):
        """The gates' parameters get every rank's share of their gradients."""
        bounds = (0, 100, 240)
        case, given = tensors(bounds)
        random_values = torch.Generator().manual_seed(1)
        a_log, dt_bias = (
            torch.randn(shape, generator=random_values) for shape in (2, (2, *case.g.shape[3:]))
        )
        given["g"] = torch.randn(case.g.shape, generator=random_values)
        shares = ranks.values(gated, given, a_log, dt_bias, bounds, world=3)
        inputs = [x.clone().requires_grad_() for x in (a_log, dt_bias)]
        full = {name: x for name, x in given.items() if name != "do"}
        o, _ = op.chunk(
            **full,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=inputs[0],
            dt_bias=inputs[1],
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens_cpu=bounds,
        )
        for i, exact in enumerate(torch.autograd.grad(o, inputs, given["do"])):
            total = sum(share[i] for share in shares)
            assert torch.allclose(total, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))

    @pytest.mark.slow
    def test_eight_ranks(self, op, tensors, assert_accurate):
        bounds = (0, 160, 160, 640)
        case, given = tensors(bounds, heads=(2, 4), gate=-0.02)
        with Ranks(8) as pool:
            for layout in ("contiguous", "zigzag", "zigzag_per_document"):
                assert_accurate(case, pool.values(part, op.name, given, bounds, {"layout": layout}, {}))


def gated(group, name, tensors, a_log, dt_bias, bounds):
    context = build_kcp_context(bounds, group)
    inputs = {name: context.shard(x) for name, x in tensors.items() if name != "do"}
    parameters = [x.clone().requires_grad_() for x in (a_log, dt_bias)]
    o, _ = Calls(name).chunk(
        **inputs,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=parameters[0],
        dt_bias=parameters[1],
        use_beta_sigmoid_in_kernel=True,
        cp_context=context,
    )
    return torch.autograd.grad(o, parameters, context.shard(tensors["do"]))


class TestBits:
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_run_to_run_whatever_is_kept(self, op, ranks, tensors, layout):
        bounds = PACKS["long and short"]
        _, given = tensors(bounds, heads=(2, 4))
        runs = [
            ranks.values(part, given, bounds, {"layout": layout}, tape, world=3)
            for tape in ({}, *op.own.TAPES.values())
        ]
        for again in runs[1:]:
            for (a, *_), (b, *_) in zip(again, runs[0], strict=True):
                for name, x in b.items():
                    assert_bitwise_equal(name, a[name], x)

    def test_whole_documents_have_the_bits_of_a_single_rank(self, op, ranks, tensors):
        bounds = (0, 50, 130, 190, 240)
        case, given = tensors(bounds, heads=(2, 4))
        got = gather(ranks.values(part, given, bounds, {}, {}, world=2), 240)
        inputs = {name: x.clone().requires_grad_() for name, x in given.items() if name != "do"}
        o, _ = op.chunk(**inputs, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=bounds)
        gradients = torch.autograd.grad(o, list(inputs.values()), case.do)
        expected = {"o": o, **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}
        for name, x in expected.items():
            for start, end in ((0, 50), (130, 190), (190, 240)):
                assert_bitwise_equal(name, got[name][:, start:end], x[:, start:end])
        # What comes before the border saw no other rank in the forward.
        assert_bitwise_equal("o", got["o"][:, :120], o[:, :120])

    def test_without_gradients(self, ranks, tensors):
        _, given = tensors((0, 240))
        plain = ranks.values(forward_alone, given, (0, 240), world=3)
        for o, (results, *_) in zip(plain, ranks.values(part, given, (0, 240), {}, {}, world=3), strict=True):
            assert_bitwise_equal("o", o, results["o"])


def forward_alone(group, name, tensors, bounds):
    context = build_kcp_context(bounds, group)
    inputs = {name: context.shard(x).requires_grad_() for name, x in tensors.items() if name != "do"}
    with torch.no_grad():
        return Calls(name).kcp_chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True)[0]


class TestExchanges:
    def test_one_each_way(self, ranks, tensors):
        _, given = tensors((0, 100, 240))
        for events in ranks.values(recorded, given, (0, 100, 240), {}, world=3):
            assert [e for e in events if e in ("start", "wait")] == ["start", "wait"] * 2

    def test_none_where_nothing_crosses(self, ranks, tensors):
        _, given = tensors(PACKS["ends on borders"])
        for events in ranks.values(recorded, given, PACKS["ends on borders"], {}, world=4):
            assert not {"start", "wait"} & set(events)

    def test_other_documents_are_walked_meanwhile(self, ranks, tensors):
        bounds = (0, 20, 90, 110, 180, 200)
        _, given = tensors(bounds)
        for events in ranks.values(recorded, given, bounds, {}, world=2):
            # A whole document is walked between an exchange's start and the wait for it, both ways.
            (start, back), (wait, back_wait) = (
                [i for i, e in enumerate(events) if e == kind] for kind in ("start", "wait")
            )
            assert "scan" in events[start:wait]
            assert {"adj", "out"} <= set(events[back:back_wait])

    def test_a_rank_that_receives_nothing_walks_meanwhile(self, ranks, tensors):
        """Stages that walk all at once: nothing enters the first rank's pieces, or leaves the last one's."""
        _, given = tensors((0, 100, 240))
        first, last = ranks.values(recorded, given, (0, 100, 240), {}, {"joint": True}, world=2)
        for events, forward, backward in ((first, True, False), (last, False, True)):
            (start, back), (wait, back_wait) = (
                [i for i, e in enumerate(events) if e == kind] for kind in ("start", "wait")
            )
            assert ("scan" in events[start:wait]) == forward
            assert ({"adj", "out"} <= set(events[back:back_wait])) == backward

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    def test_checkpoints_replay_them(self, ranks, tensors, reentrant):
        bounds = (0, 100, 240)
        _, given = tensors(bounds)
        plain = ranks.values(part, given, bounds, {}, {}, world=3)
        replayed = ranks.values(checkpointed, given, bounds, reentrant, (0, 1, 2), world=3)
        for (got, starts), (expected, *_) in zip(replayed, plain, strict=True):
            assert starts == 3
            for name, x in got.items():
                assert_bitwise_equal(name, x, expected[name])

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
    def test_a_replay_on_some_ranks_only_is_an_error(self, ranks, tensors, reentrant):
        _, given = tensors((0, 240))
        for who in ((1,), (0, 2)):
            outcomes = ranks.run(checkpointed, given, (0, 240), reentrant, who, world=3)
            assert [outcome.error for outcome in outcomes] == ["RuntimeError"] * 3
            for outcome in outcomes:
                assert "is activation checkpointing on for some ranks only?" in outcome.message
        # Every rank has seen it, and the next call finds them together again.
        assert len(ranks.values(part, given, (0, 240), {}, {}, world=3)) == 3

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "in reverse"])
    def test_interleaved_micro_batches(self, ranks, tensors, order):
        packs = ((0, 100, 240), (0, 240))
        given = [tensors(bounds, seed=i)[1] for i, bounds in enumerate(packs)]
        mixed = ranks.values(interleaved, given, packs, order, world=3)
        for i, bounds in enumerate(packs):
            apart = ranks.values(part, given[i], bounds, {}, {}, world=3)
            for got, (expected, *_) in zip(mixed, apart, strict=True):
                for name, x in got[i].items():
                    assert_bitwise_equal(name, x, expected[name])

    def test_a_rank_that_never_comes_or_dies_ends_the_others(self, op, tensors):
        _, given = tensors((0, 240))
        with Ranks(3, subgroup_timeout=5) as pool:
            outcomes = pool.run(absent, op.name, given, (0, 240), 1, world=2)
            assert (outcomes[0].error, outcomes[1].value) == ("RuntimeError", "absent")
            outcomes = pool.run(killed, op.name, given, (0, 240), 1)
        assert outcomes[1].gone
        assert [(outcome.error, outcome.gone) for outcome in outcomes[::2]] == [("RuntimeError", False)] * 2


class _Recorder:
    """Notes exchanges and stages in the order in which they begin."""

    def __init__(self, stages, events):
        self._stages, self._events = stages, events

    def __getattr__(self, name):
        self._events.append(name)
        return getattr(self._stages, name)


def recorded(group, name, tensors, bounds, how, options=None):
    _kcp = import_module(f"cake.{name}._kcp")
    events, patch = [], pytest.MonkeyPatch()
    original = _kcp._stages.stages
    with patch.context() as change:
        for kind in ("start", "wait"):
            keep = getattr(_exchange.Exchange, kind)

            def note(self, keep=keep, kind=kind):
                if kind == "start" or events.count("wait") < events.count("start"):
                    events.append(kind)  # the first wait is the one that waits
                return keep(self)

            change.setattr(_exchange.Exchange, kind, note)
        if options is None:
            change.setattr(_kcp._stages, "stages", lambda backend: _Recorder(original(backend), events))
        else:
            for stage in ("scan", "adj", "out"):
                keep = getattr(_joint.StageWalks, stage)

                def walk(self, *arguments, keep=keep, stage=stage, **more):
                    events.append(stage)
                    return keep(self, *arguments, **more)

                change.setattr(_joint.StageWalks, stage, walk)
        part(group, name, tensors, bounds, how, options or {})
    return events


def checkpointed(group, name, tensors, bounds, reentrant, who):
    """A call inside a checkpoint on the ranks `who`, and how many exchanges it took."""
    op, context = Calls(name), build_kcp_context(bounds, group)
    inputs = {name: context.shard(x).detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    starts = []
    keep = _exchange.Exchange.start

    def start(self):
        starts.append(1)
        keep(self)

    def layer(*values):
        arguments = dict(zip(inputs, values, strict=True))
        return op.kcp_chunk(**arguments, cp_context=context, use_qk_l2norm_in_kernel=True)[0]

    with pytest.MonkeyPatch().context() as change:
        change.setattr(_exchange.Exchange, "start", start)
        if context.rank in who:
            o = checkpoint(layer, *inputs.values(), use_reentrant=reentrant)
        else:
            o = layer(*inputs.values())
        o.backward(context.shard(tensors["do"]))
    return {"o": o.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}, len(starts)


def interleaved(group, name, tensors, packs, order):
    """Both forwards, then both backwards in the given order."""
    calls = []
    for given, bounds in zip(tensors, packs, strict=True):
        context = build_kcp_context(bounds, group)
        inputs = {
            name: context.shard(x).detach().requires_grad_() for name, x in given.items() if name != "do"
        }
        o, _ = Calls(name).kcp_chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True)
        calls.append((inputs, o, context.shard(given["do"])))
    results = {}
    for i in order:
        inputs, o, do = calls[i]
        gradients = torch.autograd.grad(o, list(inputs.values()), do)
        results[i] = {"o": o.detach()} | {f"d{n}": x for n, x in zip(inputs, gradients, strict=True)}
    return results


def killed(group, name, tensors, bounds, rank):
    """Rank `rank` dies between its forward and its backward."""
    import os
    import signal

    context = build_kcp_context(bounds, group)
    inputs = {name: context.shard(x).detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    o, _ = Calls(name).kcp_chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True)
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.autograd.grad(o, list(inputs.values()), context.shard(tensors["do"]))


def absent(group, name, tensors, bounds, rank):
    """Rank `rank` doesn't make the call; the others wait as long as their group lets them."""
    import time

    if build_kcp_context(bounds, group).rank == rank:
        time.sleep(10)
        return "absent"
    return part(group, name, tensors, bounds, {}, {})


class TestFla:
    """flash-linear-attention's contexts: its partition and its exchange around the op's own stages."""

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    @pytest.mark.parametrize("pack", ["one document", "short ones"])
    def test_accuracy(self, ranks, tensors, assert_accurate, layout, pack):
        for world in (1, 2, 3, 4):
            case, given = tensors(PACKS[pack], heads=(1, 2), gate=-0.01)
            joint = world == 3
            parts = ranks.values(under_fla, given, PACKS[pack], layout, False, joint, world=world)
            assert_accurate(case, parts)
            assert {route for *_, route in parts} == {
                "flash-linear-attention's context parallelism, det, torch, states saved"
            }

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_its_own_contexts(self, ranks, tensors, assert_accurate, layout):
        theirs = pytest.importorskip("fla.ops.cp", reason="flash-linear-attention isn't installed")
        if layout == "zigzag" and not hasattr(theirs.FLACPContext, "layout"):
            pytest.skip("this version of flash-linear-attention has no zigzag layout")
        case, given = tensors(PACKS["short ones"], heads=(1, 2), gate=-0.01)
        assert_accurate(case, ranks.values(under_fla, given, PACKS["short ones"], layout, True, world=3))

    def test_every_rank_exchanges_always(self, ranks, tensors):
        """A rank can't see whether others have anything to say, and theirs would wait for it."""
        _, given = tensors((0, 120, 240))
        assert ranks.values(fla_exchanges, given, (0, 120, 240), world=2) == [2, 2]


def fla_context(bounds, group, layout):
    """What flash-linear-attention's builder gives a rank, from the definition of its fields."""
    rank, world = cp._context.rank_and_world(group)
    parts = world if layout == "contiguous" else 2 * world
    share = bounds[-1] // parts
    places = [rank] if layout == "contiguous" else [rank, 2 * world - 1 - rank]
    local, counts, before, after = [0], [], [], []
    for place in places:
        start, end = place * share, (place + 1) * share
        cuts = sorted({start, end, *(b for b in bounds if start < b < end)})
        documents = [max(i for i, b in enumerate(bounds[:-1]) if b <= c) for c in cuts[:-1]]
        counts.append(len(documents))
        local += [local[-1] + b - start for b in cuts[1:]]
        before.append(place - bounds[documents[0]] // share)
        after.append((bounds[documents[-1] + 1] - 1) // share - place)
    kind = type("FLACPContext", (SimpleNamespace,), {"__module__": "fla.ops.cp.context"})
    common = {"group": group or torch.distributed.group.WORLD, "layout": layout}
    common["cu_seqlens_cpu"] = torch.tensor(local, dtype=torch.int32)
    if layout == "contiguous":
        return kind(**common, pre_num_ranks=before[0], post_num_ranks=after[0])
    edges = {"pre_num_ranks_by_part": tuple(before), "post_num_ranks_by_part": tuple(after)}
    return kind(**common, front_num_seqs=counts[0], part_len=share, **edges)


def under_fla(group, name, tensors, bounds, layout, theirs, joint=False):
    op, ours = Calls(name), build_kcp_context(bounds, group, layout=layout)
    if theirs:
        from fla.ops.cp import build_cp_context

        cu, zigzag = torch.tensor(bounds), {"layout": layout} if layout == "zigzag" else {}
        context = build_cp_context(
            cu, group=group or torch.distributed.group.WORLD, cu_seqlens_cpu=cu, **zigzag
        )
    else:
        context = fla_context(bounds, group, layout)
    inputs = {name: ours.shard(x).detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    with pytest.MonkeyPatch().context() as change:
        change.setattr(op.torch, "SELECTIONS", not joint)
        o, _ = op.chunk(**inputs, cp_context=context, use_qk_l2norm_in_kernel=True, variant="fast")
        route = str(op.package.last_route())
        gradients = torch.autograd.grad(o, list(inputs.values()), ours.shard(tensors["do"]))
    results = {"o": o.detach()} | {f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}
    return results, ours.fragments, ours.boundaries, route


def fla_exchanges(group, name, tensors, bounds):
    starts = []
    keep = _exchange.Exchange.start

    def start(self):
        starts.append(1)
        keep(self)

    with pytest.MonkeyPatch().context() as change:
        change.setattr(_exchange.Exchange, "start", start)
        under_fla(group, name, tensors, bounds, "contiguous", False)
    return len(starts)


def test_a_compiled_region_breaks_at_the_call(ranks, tensors):
    _, given = tensors((0, 240))
    for (results, broken), (expected, *_) in zip(
        ranks.values(compiled, given, (0, 240), world=2),
        ranks.values(part, given, (0, 240), {}, {}, world=2),
        strict=True,
    ):
        assert "torch.compiler.disable" in broken
        for name, x in results.items():
            assert_bitwise_equal(name, x, expected[name])


def compiled(group, name, tensors, bounds):
    op, context = Calls(name), build_kcp_context(bounds, group)
    inputs = {name: context.shard(x).detach().requires_grad_() for name, x in tensors.items() if name != "do"}

    def layer(q, k, v, g, beta):
        o, _ = op.chunk(q, k, v, g, beta, cp_context=context, use_qk_l2norm_in_kernel=True)
        return 1 * o

    o = torch.compile(layer, backend="aot_eager")(*inputs.values())
    gradients = torch.autograd.grad(o, list(inputs.values()), context.shard(tensors["do"]))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs.values())
    results = {"o": o.detach()} | {f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}
    return results, str(refused.value)
