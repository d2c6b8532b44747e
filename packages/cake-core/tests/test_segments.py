"""The plan that cuts sequences into segments: against brute force, and what it promises."""

from __future__ import annotations

import itertools
import random

import pytest

from cake.core import segments, state_chain
from cake.core.sequences import CHUNK, batched, packed, packed_on_device

RATES = segments.COST


def slow_makespan(jobs: list[int], processors: int) -> int:
    loads = [0] * processors
    for job in sorted(jobs, reverse=True):
        loads[loads.index(min(loads))] += job
    return max(loads)


def slow_cost(counts, cuts, heads, processors):
    """The same model, job by job."""
    walks, adjoints, maps, adjoint_maps, steps, chains = [], [], [], [], 0, 0
    for chunks, count in zip(counts, cuts, strict=True):
        pieces = [chunks * (i + 1) // count - chunks * i // count for i in range(count)]
        pieces.sort(reverse=True)
        if not chunks:
            continue
        for i, size in enumerate(pieces):
            walks += [RATES.start + size * RATES.scan] * heads
            adjoints += [RATES.start + size * RATES.adjoint] * heads
            pre = RATES.start + size * (RATES.transfer // 2)
            maps += [pre] * heads * ((i < count - 1) + (0 < i < count - 1))
            adjoint_maps += [RATES.start + size * (RATES.adjoint_transfer // 2)] * heads * (i > 0)
        if count > 1:
            chains, steps = chains + heads, max(steps, count - 1)
    total = slow_makespan(walks, processors) + slow_makespan(adjoints, processors)
    if steps:
        octets = state_chain.columns_per_block(chains, 128, "sm_90a") // 8
        total += slow_makespan(maps, processors) + slow_makespan(adjoint_maps, processors)
        total += 2 * (RATES.merge_start + steps * ((RATES.merge + octets * RATES.merge_octet) // 2))
    return total


def cases():
    generator, made = random.Random(0), []
    for _ in range(40):
        counts = [generator.choice([0, 1, 7, 16, 33, 60, 100, 150]) for _ in range(generator.randint(1, 3))]
        made.append((tuple(counts), generator.choice([1, 2, 3, 8]), generator.choice([1, 5, 16, 40])))
    return made


@pytest.mark.parametrize(("counts", "heads", "processors"), cases())
def test_cost_is_that_of_the_jobs_one_by_one(counts, heads, processors):
    for parts in (1, 2, 3, 8):
        cuts = tuple(max(1, min(parts, count)) for count in counts)
        expected = slow_cost(counts, cuts, heads, processors)
        assert segments.cost(counts, cuts, heads, processors) == expected
        assert segments.cost(counts, cuts, heads, processors, limit=expected + 1) == expected
        for limit in (expected, expected * 3 // 4, expected // 2, expected // 9):
            assert limit <= segments.cost(counts, cuts, heads, processors, limit=limit) <= expected


def test_walks_of_two_processors():
    half = segments.Cost(half=60)
    part = segments.Cost(scan=half.scan * 60 // 100, adjoint=half.adjoint * 60 // 100)
    assert segments.cost((40, 7), (1, 1), 4, 16, half) == segments.cost((40, 7), (1, 1), 8, 16, part)
    # One too many for every walk to have two.
    assert segments.cost((40, 7), (1, 1), 5, 19, half) == segments.cost((40, 7), (1, 1), 5, 19)
    assert segments.plan((256,) * 4, 4, rates=half) != (1, 1, 1, 1)


def test_walks_that_share_the_memory():
    full = segments.Cost(full=8 * segments.COST.scan)
    work = 100 * 4 * full.full // 16
    assert segments.cost((100,), (1,), 4, 16, full) == 2 * work  # the walks themselves would take half of it
    assert segments.cost((100,), (1,), 1, 16, full) == segments.cost((100,), (1,), 1, 16)


def test_how_a_call_is_cut():
    seqs = packed((0, 32768), 32768)
    assert segments.cut_of_call(seqs, 8, None, False).n == 16
    assert segments.cut_of_call(seqs, 8, 3, False).n == 4  # none longer than 128 chunks
    assert segments.cut_of_call(seqs, 8, 1, False) is None
    assert segments.cut_of_call(batched(8, 4096), 64, None, False) is None
    slow_merges = segments.Cost(merge=10**9)
    assert segments.cut_of_call(seqs, 8, None, False, rates=slow_merges) is None
    with pytest.raises(TypeError, match=r"segments must be an int, got 1\.5"):
        segments.cut_of_call(seqs, 8, 1.5, False)


def test_how_a_call_is_cut_whose_boundaries_nobody_knows():
    torch = pytest.importorskip("torch")
    two = packed_on_device(torch.tensor([0, 100, 60000]), 60000)
    assert segments.cut_of_call(two, 2, None, False).length == segments.plan_unseen(60000, 2, 2)
    assert segments.cut_of_call(two, 2, None, False).choice is None
    chosen = segments.cut_of_call(two, 2, None, False, chooses=True)
    assert chosen.choice == segments.choice_unseen(60000, 2, 2)
    assert chosen.length == chosen.choice.lengths[0]
    many = packed_on_device(torch.arange(17), 60000)
    assert segments.cut_of_call(many, 2, None, False, chooses=True).choice is None
    assert segments.cut_of_call(two, 2, 1, False) is None
    for name, arguments in (("segments", (2, False)), ("packing_invariant", (None, True))):
        with pytest.raises(ValueError, match=f"{name} needs the boundaries on the host"):
            segments.cut_of_call(two, 2, *arguments)
    one = packed_on_device(torch.tensor([0, 32768]), 32768)
    assert segments.cut_of_call(one, 8, None, False).boundaries is not None


@pytest.mark.parametrize(("counts", "heads", "processors"), cases())
def test_plan_is_the_best_of_its_candidates(counts, heads, processors):
    got = segments.plan(counts, heads, processors=processors)
    whole = (1,) * len(counts)
    least = slow_cost(counts, whole, heads, processors)
    options = [(least, 0, whole)]
    for length in segments.LENGTHS:
        cuts = tuple(max(1, -(-count // length)) for count in counts)
        price = slow_cost(counts, cuts, heads, processors)
        if price < least - least // 20:
            options.append((price, -length, cuts))
    assert slow_cost(counts, got, heads, processors) == min(options)[0]
    assert got == min(options)[2] or max(counts, default=0) < 2 * segments.LENGTHS[0]


@pytest.mark.parametrize(
    ("counts", "heads", "processors"),
    [((40,), 1, 8), ((40,), 4, 8), ((64, 20), 1, 16), ((30, 30), 2, 16), ((64,), 2, 132), ((50, 9), 8, 132)],
)
def test_plan_is_near_the_best_of_all_cuts(counts, heads, processors):
    every = itertools.product(*(range(1, count + 1) for count in counts))
    best = min(segments.cost(counts, cuts, heads, processors) for cuts in every)
    got = segments.cost(counts, segments.plan(counts, heads, processors=processors), heads, processors)
    assert got <= 1.25 * best


def test_plans_of_models():
    # A snapshot: a change of any of these is a change of bits.
    plans = {
        ((512,), 8): (16,),
        ((512,), 32): (4,),
        ((128,), 32): (4,),
        ((188, 141, 94, 59, 32), 48): (1, 1, 1, 1, 1),
        ((128,) * 4, 32): (1, 1, 1, 1),
        ((256,) * 4, 4): (8, 8, 8, 8),
        ((2048,), 1): (64,),
        ((15,), 1): (1,),
    }
    assert {key: segments.plan(*key) for key in plans} == plans


def test_no_planned_segment_is_longer_than_a_pre_scan_walks():
    for chunks in (129, 512, 2048, 16384, 16385):
        for heads in (1, 8, 32, 64):
            (count,) = segments.plan((chunks,), heads)
            assert count == 1 or -(-chunks // count) <= segments.MOST_CHUNKS
        (count,) = segments.plan((chunks,), 1, segments=2)
        assert -(-chunks // count) <= segments.MOST_CHUNKS


def test_a_given_number():
    assert segments.plan((0, 1, 5, 100), 2, segments=3) == (1, 1, 3, 3)
    assert segments.plan((512, 3), 2, segments=1) == (1, 1)


def test_a_packing_invariant_plan_depends_on_the_sequence_alone():
    counts = (512, 0, 40, 512, 9)
    alone = tuple(segments.plan((count,), 32)[0] for count in counts)
    assert segments.plan(counts, 32, packing_invariant=True) == alone
    assert segments.plan(counts, 32) != alone


def test_the_device_is_not_asked(monkeypatch):
    torch = pytest.importorskip("torch")

    def refuse(*_):
        raise AssertionError("a plan looked at the device")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    assert segments.plan((400, 3), 5) == segments.plan((400, 3), 5, processors=132)


@pytest.mark.parametrize("name", ["heads", "processors", "segments"])
def test_refusals(name):
    arguments = {"heads": 1, "processors": 1, "segments": 2, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        segments.plan((10,), **arguments)


class TestUnseen:
    """Boundaries that exist on a device only."""

    def test_plans_of_models(self):
        # A snapshot: a change of any of these is a change of bits.
        plans = {
            (32768, 5, 48): None,
            (32768, 4, 32): 128,
            (7744, 4, 12): 12,
            (7744, 4, 32): 32,
            (1000, 3, 2): None,
            (1 << 20, 3, 1): 128,
        }
        assert {key: segments.plan_unseen(*key) for key in plans} == plans

    def test_choices(self):
        # A snapshot: a change of any of these is a change of bits.
        choices = {
            (32768, 5, 48): (128,),
            (32768, 4, 32): (96, 128),
            (7744, 4, 12): (8, 12, 16, 24),
            (7744, 4, 32): (24, 32, 48, 64),
            (1 << 20, 15, 64): (128,),
            (1 << 23, 3, 1): None,  # more segments than a merge may meet
            (32768, 3, 132): None,
            (1000, 3, 2): None,
        }
        for key, lengths in choices.items():
            choice = segments.choice_unseen(*key)
            assert (choice and choice.lengths) == lengths, key
        rates = segments.Cost(scan=1)
        choice = segments.choice_unseen(7744, 4, 1, rates=rates, processors=7)
        assert choice == segments.Choice((12, 16, 24, 32), 1, 7, rates)

    def test_a_choice_is_the_best_of_its_own(self):
        generator = random.Random(5)
        for _ in range(100):
            counts = tuple(generator.randrange(300) for _ in range(generator.randint(2, 6)))
            choice = segments.choice_unseen(64 * max(16, sum(counts)), len(counts), 8)
            options = [(1,) * len(counts)]
            options += [tuple(max(1, -(-count // x)) for count in counts) for x in choice.lengths]
            least, *cuts = (segments.cost(counts, option, 8, 132) for option in options)
            got = segments.cost(counts, choice.plan(counts), 8, 132)
            assert got == min([least, *(cut for cut in cuts if cut < least - least // 20)])

    def test_nothing_is_longer_than_its_share_or_a_pre_scan(self):
        for tokens in range(1000, 200000, 7777):
            for n, heads in ((2, 1), (3, 8), (7, 32), (100, 16)):
                length = segments.plan_unseen(tokens, n, heads)
                if length is not None:
                    assert length in segments.LENGTHS
                    assert length * 132 >= (tokens // CHUNK) * heads
                    assert (tokens // CHUNK + n) // length < segments.MOST_SEGMENTS

    def test_there_is_room_for_every_cut(self):
        torch = pytest.importorskip("torch")
        generator = random.Random(1)
        for _ in range(200):
            n, length = generator.randint(2, 9), generator.choice(segments.LENGTHS)
            lengths = [generator.choice([0, 1, 63, 64, 65, 1000, 5000, 20000]) for _ in range(n)]
            bounds = list(itertools.accumulate(lengths, initial=0))
            seqs = packed_on_device(torch.tensor(bounds), bounds[-1])
            cut = segments.cut_unseen(seqs, length)
            chunks = [-(-x // CHUNK) for x in lengths]
            chosen = segments.cut_of_call(seqs, 8, None, False, chooses=True)
            assert chosen is None or sum(chosen.choice.plan(chunks)) <= chosen.n
            needed = sum(max(1, -(-count // length)) for count in chunks)
            assert needed <= cut.n
            assert cut.n <= needed + 2 * n + 1
            assert cut.slots(True) == seqs.slots(True)


@pytest.mark.parametrize("chunks", [1, 2, 7, 64, 129])
def test_sizes(chunks):
    for count in range(1, chunks + 1):
        sizes = segments.sizes(chunks, count)
        assert len(sizes) == count
        assert sum(sizes) == chunks
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


class TestCut:
    LENGTHS = (200, 0, 64, 1000)

    @pytest.fixture
    def seqs(self):
        bounds = list(itertools.accumulate(self.LENGTHS, initial=0))
        return packed(bounds, bounds[-1])

    def test_chunks_stay_what_they_are(self, seqs):
        cut = segments.cut(seqs, (2, 1, 1, 5))
        assert [x[2:] for x in cut.chunks] == [x[2:] for x in seqs.chunks]
        assert cut.total == seqs.total
        assert cut.chunk_counts == (2, 2, 0, 1, 4, 3, 3, 3, 3)
        assert cut.slots(True) == seqs.slots(True)
        for s in range(cut.n - 1):
            if cut.followed[s]:
                assert cut.lengths[s] % CHUNK == 0

    def test_neighbours(self, seqs):
        cut = segments.cut(seqs, (2, 1, 1, 3))
        assert cut.sequence == (0, 0, 1, 2, 3, 3, 3)
        assert cut.opens == (False, True, False, False, False, True, True)
        assert cut.followed == (True, False, False, False, True, True, False)
        assert cut.whole is seqs
        assert cut.chains == (((0, -1, 1),), ((4, -1, 5), (5, 5, 6)))
        assert cut.adjoint_chains == (((1, -1, 0),), ((6, -1, 5), (5, 5, 4)))

    def test_rows_of_a_batch(self):
        seqs = batched(3, 200)
        cut = segments.cut(seqs, (2, 1, 4))
        assert (cut.batch, cut.tokens, cut.total) == (3, 200, 600)
        assert cut.boundaries == (0, 128, 200, 400, 464, 528, 592, 600)

    @pytest.mark.parametrize(
        ("counts", "message"),
        [
            ((1, 1, 1), "counts must hold 4 numbers, one for each sequence, got 3"),
            ((1, 1, 2, 1), r"counts\[2\] must be from 1 to 1, got 2"),
            ((0, 1, 1, 1), r"counts\[0\] must be from 1 to 4, got 0"),
        ],
    )
    def test_refusals(self, seqs, counts, message):
        with pytest.raises(ValueError, match=message):
            segments.cut(seqs, counts)

    def test_boundaries_on_a_device(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(RuntimeError, match="exist on a device only"):
            segments.cut(packed_on_device(torch.tensor([0, 64, 200]), 200), (1, 1))
