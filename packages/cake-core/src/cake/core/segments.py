"""Cutting long sequences into segments that are walked at once: the plan, and the segments of a call.

A serial walk takes one step a chunk, and one CTA walks one (sequence, head): few heads and long sequences
leave most of a GPU idle. So a sequence may be cut into segments. A *pre-scan* finds the affine map
``S_out = M S_in + B`` of each segment that another one follows, the *merge* chains the maps into the state
that enters each segment, and then all segments are walked at once.

`plan` decides how many segments each sequence gets: a pure function of chunk counts, heads and a declared
number of processors, in integers, never of a device. `cut` makes the segments of a call of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from cake.core.checks import check_count
from cake.core.sequences import CHUNK, Sequences, packed

if TYPE_CHECKING:
    import torch

__all__ = [
    "LEAST",
    "PROCESSORS",
    "Choice",
    "Cost",
    "Segments",
    "UnseenSegments",
    "choice_unseen",
    "cost",
    "cut",
    "cut_of_call",
    "cut_unseen",
    "makespan",
    "plan",
    "plan_unseen",
    "sizes",
]

#: Declared processors of an architecture: what plans count on, whatever the device has.
PROCESSORS = {"sm_90a": 132}
#: By variant, natural log of the decay below which a state is taken to be gone. e^-20 is 2e-9: less than fp32
#: sees of a state beside another of its size. fast may see less.
LEAST = {"det": -20.0, "fast": -10.0}
#: Longest segments that `plan` chooses from, in chunks. None is longer than a pre-scan may walk.
LENGTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128)
MOST_CHUNKS = 128
#: Segments of one sequence that a merge on the device may meet.
MOST_SEGMENTS = 640
#: Most sequences of a call whose cut is chosen on a device, and most lengths to choose from (`plan.cuh`).
CHOSEN_SEQUENCES, CHOSEN_LENGTHS = 15, 4


@dataclass(frozen=True)
class Cost:
    """Time of the parts of a call on an H200, in ns. An op brings its own; these are older ones.

    start: of a block, before its first chunk and after its last one.
    scan, adjoint: of one chunk of one head in the walks of the forward and the backward.
    transfer, adjoint_transfer: of one chunk of one head in a pre-scan of M or B, and of the backward's B. The
        decay of most heads lets a pre-scan look at a segment's last few chunks only: half of it is counted.
    merge_start: of a merge. merge, merge_octet: of one of its steps, and more for each 8 columns that a block
        takes (`cake.core.state_chain`); half of these too.
    half: where walks take two processors each if there are enough of them, percent of a chunk's time that it
        takes then, at least 50; 0 where they don't.
    full: of one chunk of one head in the walks, where every processor walks: they share the memory.
    """

    start: int = 14000
    scan: int = 3100
    adjoint: int = 2950
    transfer: int = 1750
    adjoint_transfer: int = 2400
    merge_start: int = 4000
    merge: int = 4500
    merge_octet: int = 800
    half: int = 0
    full: int = 0


COST = Cost()


@dataclass(frozen=True, eq=False)
class Segments(Sequences):
    """Segments of a call's sequences, as sequences of their own; chunks and their order are the call's.

    `boundaries` are those of the segments, `n` their number. Their tapes have a slot for every chunk.

    sequence: index of the sequence that each segment belongs to.
    opens: whether the state that enters it comes from a segment before it; else it is the sequence's own.
    followed: whether another segment goes on with the state that leaves it.
    whole: the sequences that were cut.
    """

    sequence: tuple[int, ...]
    opens: tuple[bool, ...]
    followed: tuple[bool, ...]
    whole: Sequences

    @cached_property
    def chains(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Merges of the forward: for each sequence of several segments the steps (b tile, m tile, out row).

        Tiles and rows are numbered by segments; a first segment's own state needs no M (-1).
        """
        return tuple(
            tuple((s, s if self.opens[s] else -1, s + 1) for s in run[:-1])
            for run in self._runs
            if len(run) > 1
        )

    @cached_property
    def adjoint_chains(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Merges of the backward: the same from each sequence's last segment on, with M transposed."""
        return tuple(
            tuple((s, s if self.followed[s] else -1, s - 1) for s in reversed(run[1:]))
            for run in self._runs
            if len(run) > 1
        )

    @cached_property
    def _runs(self) -> tuple[range, ...]:
        """The segments of each sequence."""
        first = [s for s in range(self.n) if not s or self.sequence[s] != self.sequence[s - 1]]
        return tuple(range(a, b) for a, b in zip(first, [*first[1:], self.n], strict=True))


@dataclass(frozen=True)
class Choice:
    """What a device chooses from where only it knows the boundaries.

    lengths: most chunks of a segment, ascending; sequences may stay whole too.
    """

    lengths: tuple[int, ...]
    heads: int
    processors: int
    rates: Cost

    def plan(self, chunk_counts: Sequence[int]) -> tuple[int, ...]:
        """Number of segments that the device cuts each sequence into: as `plan`, of these lengths alone."""
        return _planned(tuple(chunk_counts), self.heads, self.processors, self.rates, self.lengths)


@dataclass(frozen=True, eq=False)
class UnseenSegments(Segments):
    """Segments of sequences whose boundaries exist on a device only: the tables are made there.

    `n` is a bound on their number; those that aren't needed are empty. `sequence`, `opens` and `followed` are
    empty.

    length: most chunks of a segment. A sequence is cut into as few of equal size as keep to it.
    choice: what the device chooses from in its place; then it is the least of that.
    """

    length: int
    choice: Choice | None = None

    def at(self, cu_device: torch.Tensor | None) -> UnseenSegments:
        """See `Sequences.at`."""
        made = super().at(cu_device)
        vars(made)["whole"] = self.whole.at(cu_device)
        return made


def plan(
    chunk_counts: Sequence[int],
    heads: int,
    *,
    processors: int = PROCESSORS["sm_90a"],
    segments: int | None = None,
    packing_invariant: bool = False,
    rates: Cost | None = None,
) -> tuple[int, ...]:
    """Number of segments of each sequence, at least 1.

    The longest segment is one of `LENGTHS`, or sequences stay whole; a sequence is cut into as few segments
    of equal size as keep to it. The cheapest of these plans wins, if it costs 5 % less than no cut; of equal
    ones the one with longer segments.

    Args:
        chunk_counts: chunks of each sequence; 0 for an empty one.
        heads: v heads.
        processors: blocks that run at once.
        segments: this number for every sequence that has as many chunks, else one for each chunk; more where
            they would be longer than 128 chunks. 1 cuts nothing.
        packing_invariant: plan each sequence as if it were alone in the call, so that its bits don't depend
            on what it is packed with. Where the others would fill the processors it is cut all the same, and
            the call takes up to about one and a half times as long.
        rates: what the parts of a call take; `COST` by default.

    Raises:
        ValueError: less than one head, processor or segment.
    """
    for name, value in (("heads", heads), ("processors", processors), ("segments", segments)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    counts, rates = tuple(chunk_counts), rates or COST
    if segments is not None:
        if segments == 1:
            return (1,) * len(counts)
        return tuple(max(1, min(max(segments, -(-count // MOST_CHUNKS)), count)) for count in counts)
    if packing_invariant:
        return tuple(_planned((count,), heads, processors, rates)[0] for count in counts)
    return _planned(counts, heads, processors, rates)


def plan_unseen(tokens: int, n: int, heads: int, *, processors: int = PROCESSORS["sm_90a"]) -> int | None:
    """Most chunks of a segment where the boundaries of several sequences exist on a device only, or None.

    The least of `LENGTHS` that is no shorter than an even share of all chunks and heads for each processor: a
    longer sequence would keep one processor busy when the others are done.
    """
    chunks = tokens // CHUNK
    if chunks < 2 * LENGTHS[0]:
        return None
    share = -(-(chunks + n) * heads // processors)
    fitting = [x for x in LENGTHS if x >= share and (chunks + n) // x < MOST_SEGMENTS]
    return fitting[0] if fitting and fitting[0] < chunks else None


def choice_unseen(
    tokens: int,
    n: int,
    heads: int,
    *,
    processors: int = PROCESSORS["sm_90a"],
    rates: Cost | None = None,
) -> Choice | None:
    """What a device may choose from where the boundaries of a few sequences exist there only.

    None where no cut is worth it, whatever they are: one sequence of all the tokens would stay whole. Lengths
    from two thirds of an even share on: shorter ones gain little, and room is made for the most segments that
    any boundaries would give.
    """
    chunks, rates = tokens // CHUNK, rates or COST
    if _planned((chunks,), heads, processors, rates) == (1,):
        return None
    least = min(2 * (chunks + n) * heads // (3 * processors), MOST_CHUNKS)
    lengths = [x for x in LENGTHS if least <= x < chunks and (chunks + n) // x < MOST_SEGMENTS]
    return Choice(tuple(lengths[:CHOSEN_LENGTHS]), heads, processors, rates) if lengths else None


def cut_of_call(
    seqs: Sequences,
    heads: int,
    segments: int | None,
    packing_invariant: bool,
    *,
    rates: Cost | None = None,
    chooses: bool = False,
) -> Segments | None:
    """The segments of a call, or None where it isn't cut.

    Args:
        seqs: the call's sequences.
        heads: v heads.
        segments, packing_invariant: as of `plan`, from the call's own arguments.
        rates: what the parts of a call take; `COST` by default.
        chooses: whether the op's kernels can plan on the device (`Choice`).

    Raises:
        TypeError: segments that are no whole number.
        ValueError: less than one segment; boundaries of several sequences that exist on a device only, where
            they have to be known.
    """
    if segments is not None:
        segments = check_count("segments", segments)
    whole = seqs
    if seqs.boundaries is None:
        if seqs.n > 1:
            for name, given in (("segments", (segments or 1) > 1), ("packing_invariant", packing_invariant)):
                if given:
                    raise ValueError(f"{name} needs the boundaries on the host: give cu_seqlens_cpu")
            if segments is not None:
                return None
            if chooses and seqs.n <= CHOSEN_SEQUENCES:
                choice = choice_unseen(seqs.tokens, seqs.n, heads, rates=rates)
                return None if choice is None else cut_unseen(seqs, choice.lengths[0], choice)
            length = plan_unseen(seqs.tokens, seqs.n, heads)
            return None if length is None else cut_unseen(seqs, length)
        whole = packed((0, seqs.total), seqs.total)
    counts = plan(
        whole.chunk_counts, heads, segments=segments, packing_invariant=packing_invariant, rates=rates
    )
    return cut(whole, counts) if max(counts) > 1 else None


def sizes(chunks: int, segments: int) -> tuple[int, ...]:
    """Chunks of each segment of a sequence: they differ by one at most, longer ones first."""
    size, longer = divmod(chunks, segments)
    return (size + 1,) * longer + (size,) * (segments - longer)


def cut(seqs: Sequences, counts: Sequence[int]) -> Segments:
    """The segments of sequences with boundaries known on the host, `counts[s]` of sequence s.

    Raises:
        ValueError: not one count for each sequence, or one that isn't from 1 to the sequence's chunks (1 for
            an empty one).
        RuntimeError: the boundaries exist on a device only.
    """
    return _cut(seqs, tuple(counts))


@lru_cache(maxsize=16)
def _cut(seqs: Sequences, counts: tuple[int, ...]) -> Segments:
    bounds = seqs.host_boundaries()
    if len(counts) != seqs.n:
        raise ValueError(f"counts must hold {seqs.n} numbers, one for each sequence, got {len(counts)}")
    ends, sequence, opens, followed = [bounds[0]], [], [], []
    for s, (chunks, count) in enumerate(zip(seqs.chunk_counts, counts, strict=True)):
        if not 1 <= count <= max(chunks, 1):
            raise ValueError(f"counts[{s}] must be from 1 to {max(chunks, 1)}, got {count}")
        for i, size in enumerate(sizes(chunks, count)):
            last = i == count - 1
            ends.append(bounds[s + 1] if last else ends[-1] + size * CHUNK)
            sequence.append(s)
            opens.append(i > 0)
            followed.append(not last)
    return Segments(
        batch=seqs.batch,
        tokens=seqs.tokens,
        boundaries=tuple(ends),
        cu_device=None,
        n=len(sequence),
        chunk_capacity=seqs.chunk_capacity,
        boundary_capacity=seqs.boundary_capacity,
        sequence=tuple(sequence),
        opens=tuple(opens),
        followed=tuple(followed),
        whole=seqs,
    )


def cut_unseen(seqs: Sequences, length: int, choice: Choice | None = None) -> UnseenSegments:
    """The segments of sequences with boundaries on a device: of at most `length` chunks, or as it chooses."""
    return UnseenSegments(
        batch=seqs.batch,
        tokens=seqs.tokens,
        boundaries=None,
        cu_device=seqs.cu_device,
        n=seqs.n + (seqs.tokens // CHUNK + seqs.n) // length,
        chunk_capacity=seqs.chunk_capacity,
        boundary_capacity=seqs.boundary_capacity,
        sequence=(),
        opens=(),
        followed=(),
        whole=seqs,
        length=length,
        choice=choice,
    )


@lru_cache(maxsize=64)
def _planned(
    counts: tuple[int, ...], heads: int, processors: int, rates: Cost, lengths: tuple[int, ...] = LENGTHS
) -> tuple[int, ...]:
    whole = (1,) * len(counts)
    longest = max(counts, default=0)
    if longest < 2 * LENGTHS[0]:
        return whole
    least = cost(counts, whole, heads, processors, rates)
    best, limit = whole, least - least // 20
    # No cut makes less of the walks themselves.
    if sum(counts) * heads * (rates.scan + rates.adjoint) // processors >= limit:
        return whole
    for length in reversed(lengths):
        if length >= longest:
            continue
        cuts = tuple(max(1, -(-count // length)) for count in counts)
        if cuts != best and (here := cost(counts, cuts, heads, processors, rates, limit)) < limit:
            best, limit = cuts, here
    return best


def cost(
    counts: Sequence[int],
    cuts: Sequence[int],
    heads: int,
    processors: int,
    rates: Cost = COST,
    limit: int | None = None,
) -> int:
    """Estimated ns of the serial parts of a forward and a backward with `cuts[s]` segments of sequence s.

    With a `limit`, of plans that take as long or longer something from it on.
    """
    walks: list[tuple[int, int]] = []
    maps: list[tuple[int, int]] = []
    adjoints: list[tuple[int, int]] = []
    chains, steps = 0, 0
    for chunks, segments in zip(counts, cuts, strict=True):
        if not chunks:
            continue
        size, longer = divmod(chunks, segments)
        walks += [(size + 1, longer * heads), (size, (segments - longer) * heads)]
        if segments == 1:
            continue
        chains, steps = chains + heads, max(steps, segments - 1)
        # The first segment needs no M and the last one nothing; the backward mirrors it and has no M at all.
        long_maps = 2 * longer - 1 if longer else 0
        maps += [(size + 1, long_maps * heads), (size, (2 * segments - 3 - long_maps) * heads)]
        long_adjoints = max(longer - 1, 0)
        adjoints += [(size + 1, long_adjoints * heads), (size, (segments - 1 - long_adjoints) * heads)]
    total, parts = 0, []
    shared = sum(counts) * heads * rates.full // processors
    for items, rate, least in (
        (walks, rates.scan, shared),
        (walks, rates.adjoint, shared),
        (maps, rates.transfer // 2, 0),
        (adjoints, rates.adjoint_transfer // 2, 0),
    ):
        if rates.half and 2 * sum(count for _, count in items) <= processors:
            items, rate = [(chunks, 2 * count) for chunks, count in items], rate * rates.half // 100
        if items:
            parts.append((items, rate, least))
    if steps:
        octets = 1 if chains <= 8 else 2 if chains <= 16 else 4 if chains <= 33 else 8
        total += 2 * (rates.merge_start + steps * ((rates.merge + octets * rates.merge_octet) // 2))
    # An even share of the work is the least that a part takes, and told much sooner than what it does take.
    if limit is not None:
        floor = total
        for items, rate, least in parts:
            work = sum(count * (rates.start + chunks * rate) for chunks, count in items)
            floor += max(-(-work // processors), least)
        if floor >= limit:
            return floor
    return total + sum(
        max(makespan(items, processors, rates.start, rate), least) for items, rate, least in parts
    )


def makespan(items: Iterable[tuple[int, int]], processors: int, start: int, rate: int) -> int:
    """When the last processor is done with items of (chunks, how many): the longest first, to the first free.

    An item takes `start + chunks * rate`.
    """
    loads = [(0, processors)]  # (busy until, processors): a heap
    for chunks, count in sorted(items, reverse=True):
        while count > 0:
            load, free = heappop(loads)
            taken = min(free, count)
            if taken < free:
                heappush(loads, (load, free - taken))
            heappush(loads, (load + start + chunks * rate, taken))
            count -= taken
    return max(load for load, _ in loads)
