"""The same call for stages that walk all sequences at once: kernels read one table of the whole call.

A rank's sequences are walked as segments. Those at a document's inner edges have neighbours on other ranks,
for which empty segments stand; long ones are cut further, so that few heads fill a GPU. A pre-scan finds the
maps of segments that have neighbours, the exchange brings everyone's, and then everything is walked from
merged states; on a rank that receives none, while the exchange is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch

from cake.core.cp._plan import ENTERED, LEFT, Chains, Plan
from cake.core.cp._run import Forward, exchange_of, fill, halves, kept_of
from cake.core.segments import MOST_CHUNKS, Cost, Segments, plan, sizes
from cake.core.sequences import CHUNK, Sequences
from cake.core.state_chain import Step

__all__ = ["Cut", "JointWalks", "StageWalks", "backward_jointly", "cut_of", "forward_jointly"]


class JointWalks(Protocol):
    """An op's stages in one call, with its tensors and results. States are fp32 [segments, HV, 128, 128]."""

    heads: int
    device: torch.device

    def scan(self, seqs: Sequences, entering: torch.Tensor | None, *, save: bool, output: bool) -> Any:
        """Tape of the walk; writes the call's output unless `output` is False."""

    def transfer(self, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """B, M and which maps aren't 0."""

    def adj(self, seqs: Sequences, leaving: torch.Tensor | None) -> Any:
        """Tape of the adjoint walk."""

    def adj_transfer(self, segments: Segments, live: torch.Tensor) -> torch.Tensor:
        """B of the adjoint walk."""

    def out(self, seqs: Sequences, tape: Any, adj_tape: Any, *, edge: bool) -> None:
        """The parallel rest of the backward from both tapes, into the call's gradients."""

    def merge(
        self,
        b: torch.Tensor,
        m: torch.Tensor,
        chains: Chains,
        n_out: int,
        *,
        live: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> torch.Tensor:
        """States along chains: see `cake.core.state_chain.merge`."""


@dataclass
class StageWalks:
    """`JointWalks` of an op's stages, each bound to a call's tensors; the last three are a backward's.

    scan_stage: (seqs, *, entering, save_states, need_output) -> (o, final state, tape).
    transfer_stage: (segments) -> (B, M, live).
    merge_stage: as `cake.core.state_chain.merge`.
    adj_stage: (seqs, *, leaving) -> (y, tape, dh0).
    adj_transfer_stage: (segments, live) -> B.
    out_stage: (y, tape, adjoint tape, seqs, *, states_edge, adj_edge) -> the op's gradients.
    o, gradients: the results; until they are made, what a rank without tokens has.
    """

    heads: int
    device: torch.device
    scan_stage: Callable[..., Any]
    transfer_stage: Callable[..., Any]
    merge_stage: Callable[..., torch.Tensor]
    adj_stage: Callable[..., Any] | None = None
    adj_transfer_stage: Callable[..., torch.Tensor] | None = None
    out_stage: Callable[..., Any] | None = None
    o: Any = None
    gradients: Any = None

    def scan(self, seqs: Sequences, entering: torch.Tensor | None, *, save: bool, output: bool) -> Any:
        o, _, tape = self.scan_stage(seqs, entering=entering, save_states=save, need_output=output)
        if output:
            self.o = o
        return tape

    def transfer(self, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, m, live = self.transfer_stage(segments)
        return b, m, live

    def adj(self, seqs: Sequences, leaving: torch.Tensor | None) -> Any:
        assert self.adj_stage is not None
        self._y, tape, _ = self.adj_stage(seqs, leaving=leaving)
        return tape

    def adj_transfer(self, segments: Segments, live: torch.Tensor) -> torch.Tensor:
        assert self.adj_transfer_stage is not None
        return self.adj_transfer_stage(segments, live)

    def out(self, seqs: Sequences, tape: Any, adj_tape: Any, *, edge: bool) -> None:
        assert self.out_stage is not None
        self.gradients = self.out_stage(self._y, tape, adj_tape, seqs, states_edge=edge, adj_edge=edge)

    def merge(
        self,
        b: torch.Tensor,
        m: torch.Tensor,
        chains: Chains,
        n_out: int,
        *,
        live: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> torch.Tensor:
        return self.merge_stage(
            b.contiguous(), m.contiguous(), chains, n_out, live=live, transposed=transposed
        )


@dataclass(frozen=True, eq=False)
class Cut:
    """The segments of a rank's sequences.

    segments: an empty one before each sequence that a state enters, and behind each that another piece goes
        on with; what was merged for them is put into their rows of B.
    runs: for each sequence its segments with tokens.
    inner, adjoint_inner: merges inside sequences, from those rows to the segments.
    """

    segments: Segments
    runs: tuple[tuple[int, ...], ...]
    inner: Chains
    adjoint_inner: Chains

    def before(self, sequences: Sequence[int]) -> list[int]:
        """The empty segments before sequences that a state enters."""
        return [self.runs[s][0] - 1 for s in sequences]

    def behind(self, sequences: Sequence[int]) -> list[int]:
        """The empty segments behind sequences that go on elsewhere."""
        return [self.runs[s][-1] + 1 for s in sequences]


def cut_of(part: Plan, heads: int, rates: Cost | None = None) -> Cut | None:
    """How a rank's sequences are walked: None where each is walked whole and has no neighbour.

    `rates`: as of `cake.core.segments.plan`, an op's own.
    """
    counts = list(plan(part.seqs.chunk_counts, heads, rates=rates))
    for role in ("first", "middle", "last"):
        for s in part.ids[role]:
            counts[s] = max(counts[s], -(-part.seqs.chunk_counts[s] // MOST_CHUNKS))
    if not part.forward.tiles and max(counts) == 1:
        return None
    return _cut(part, tuple(counts))


@lru_cache(maxsize=64)
def _cut(part: Plan, counts: tuple[int, ...]) -> Cut:
    entered, left = ({s for role in roles for s in part.ids[role]} for roles in (ENTERED, LEFT))
    ends: list[int] = [0]
    sequence: list[int] = []
    opens: list[bool] = []
    runs: list[tuple[int, ...]] = []
    for s, (start, end) in enumerate(part.seqs.spans):
        stops = [start] * (s in entered)
        for size in sizes(part.seqs.chunk_counts[s], counts[s]):
            stops.append(min((stops[-1] if stops[s in entered :] else start) + size * CHUNK, end))
        first = len(opens) + (s in entered)
        runs.append(tuple(range(first, first + counts[s])))
        stops += [end] * (s in left)
        ends += stops
        sequence += [s] * len(stops)
        opens += [i > 0 for i in range(len(stops))]
    segments = Segments(
        batch=1,
        tokens=part.seqs.tokens,
        boundaries=tuple(ends),
        cu_device=None,
        n=len(opens),
        chunk_capacity=part.seqs.chunk_capacity,
        boundary_capacity=part.seqs.boundary_capacity,
        sequence=tuple(sequence),
        opens=tuple(opens),
        followed=(*opens[1:], False),
        whole=part.seqs,
    )
    inner: list[tuple[Step, ...]] = []
    adjoint_inner: list[tuple[Step, ...]] = []
    for s, run in enumerate(runs):
        steps = [(run[0] - 1, -1, run[0])] * (s in entered)
        steps += [(a, a if opens[a] else -1, b) for a, b in pairwise(run)]
        back = [(run[-1] + 1, -1, run[-1])] * (s in left)
        back += [(b, b if segments.followed[b] else -1, a) for a, b in reversed(list(pairwise(run)))]
        inner += [tuple(steps)] * bool(steps)
        adjoint_inner += [tuple(back)] * bool(back)
    return Cut(segments, tuple(runs), tuple(inner), tuple(adjoint_inner))


def forward_jointly(
    part: Plan, walks: JointWalks, group: Any, *, save: bool, rates: Cost | None = None
) -> Forward:
    """The forward of a rank; see `forward`. Tapes: "all", and with segments their maps "m" and "live".

    `rates`: as of `cut_of`; the backward's are the same.
    """
    d, cut = part.forward, cut_of(part, walks.heads, rates)
    exchange = exchange_of("forward", part, walks, group) if d.tiles else None
    maps: tuple[torch.Tensor, ...] = ()
    own_maps = entering = kept = None
    if part.seqs.total and cut is not None:
        b, *rest = walks.transfer(cut.segments)
        maps = (b, *rest)
        if exchange is not None:
            ends, own_maps = _maps_of(walks, part, cut, *maps)
            fill(exchange, part, d, ends, own_maps)
    if exchange is not None:
        exchange.start()
        # A rank that no state enters walks while the exchange is under way.
        if d.chains:
            everyones_b, everyones_m = halves(exchange.wait(), part)
            entering = walks.merge(everyones_b, everyones_m, d.chains, d.receivers)
    tapes: dict[str, Any] = {}
    if part.seqs.total:
        states = None if cut is None else _entering(walks, part, cut, maps, entering)
        tape = walks.scan(part.seqs if cut is None else cut.segments, states, save=save, output=True)
        if save:
            tapes = {"all": tape} | dict(zip(("m", "live"), maps[1:], strict=False))
    if exchange is not None:
        _, everyones_m = halves(exchange.wait(), part)
        kept = own_maps if part.joined else kept_of(part, everyones_m)
    return Forward(tapes=tapes, entering=entering, maps=kept)


def backward_jointly(
    part: Plan, walks: JointWalks, group: Any, made: Forward, *, rates: Cost | None = None
) -> None:
    """The backward of a rank; see `backward`."""
    d, cut = part.backward, cut_of(part, walks.heads, rates)
    exchange = exchange_of("backward", part, walks, group) if d.tiles else None
    total, tape, leaving = part.seqs.total, made.tapes.get("all"), None
    maps: tuple[torch.Tensor, ...] = ()
    if total and cut is not None:
        if tape is None:
            maps = walks.transfer(cut.segments)
            m, live = maps[1:]
        else:
            m, live = made.tapes["m"], made.tapes["live"]
        b = walks.adj_transfer(cut.segments, live)
        if exchange is not None:
            echoed = None if made.maps is None or not part.joined else made.maps.mT
            fill(exchange, part, d, [_adjoints_of(walks, part, cut, b, m, live)], echoed)
    if exchange is not None:
        exchange.start()
    seqs = part.seqs if cut is None else cut.segments
    if total and tape is None:
        states = None if cut is None else _entering(walks, part, cut, maps, made.entering)
        tape = walks.scan(seqs, states, save=True, output=False)
    if exchange is not None and d.chains:
        everyones_b, everyones_m = halves(exchange.wait(), part)
        if not part.joined:
            everyones_m = everyones_b[:0] if made.maps is None else made.maps
        leaving = walks.merge(everyones_b, everyones_m, d.chains, d.receivers, transposed=not part.joined)
    if total:
        adjoints = None
        if cut is not None:
            _put(b, cut.behind([s for role in LEFT for s in part.ids[role]]), leaving)
            adjoints = _inside(walks, cut.adjoint_inner, b, m, live, transposed=True)
        walks.out(seqs, tape, walks.adj(seqs, adjoints), edge=cut is not None)
    if exchange is not None:
        exchange.wait()


def _entering(
    walks: JointWalks,
    part: Plan,
    cut: Cut,
    maps: tuple[torch.Tensor, ...],
    entering: torch.Tensor | None,
) -> torch.Tensor:
    """The state that enters each segment."""
    b, m, live = maps
    _put(b, cut.before([s for role in ENTERED for s in part.ids[role]]), entering)
    return _inside(walks, cut.inner, b, m, live, transposed=False)


def _inside(
    walks: JointWalks,
    chains: Chains,
    b: torch.Tensor,
    m: torch.Tensor,
    live: torch.Tensor,
    *,
    transposed: bool,
) -> torch.Tensor:
    """States at the edges of segments; rows that no chain names are nobody's."""
    if not chains:
        return torch.empty_like(b)
    return walks.merge(b, m, chains, b.shape[0], live=live, transposed=transposed)


def _put(b: torch.Tensor, rows: list[int], states: torch.Tensor | None) -> None:
    if states is not None:
        for row, state in zip(rows, states, strict=True):
            b[row].copy_(state)


def _maps_of(
    walks: JointWalks, part: Plan, cut: Cut, b: torch.Tensor, m: torch.Tensor, live: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """B of first and of middle sequences, and M of the latter: those of their segments, composed."""
    first, middle = ([cut.runs[s] for s in part.ids[role]] for role in LEFT)
    ends: list[torch.Tensor] = []
    if first:
        chains = tuple(
            tuple((i, i if j else -1, row if i == run[-1] else -1) for j, i in enumerate(run))
            for row, run in enumerate(first)
        )
        ends.append(walks.merge(b, m, chains, len(first), live=live))
    own_maps = None
    if middle:
        # Both parts of a map at once, as the columns of one state.
        wide = b.new_zeros((sum(map(len, middle)), *b.shape[1:3], 256))
        tile, steps = 0, []
        for row, run in enumerate(middle):
            wide[tile, ..., 128:].copy_(m[run[0]])
            chain = []
            for j, i in enumerate(run):
                wide[tile, ..., :128].copy_(b[i])
                chain.append((tile, i if j else -1, row if i == run[-1] else -1))
                tile += 1
            steps.append(tuple(chain))
        both = walks.merge(wide, m, tuple(steps), len(middle), live=live)
        ends.append(both[..., :128])
        own_maps = both[..., 128:].contiguous()
    return ends, own_maps


def _adjoints_of(
    walks: JointWalks, part: Plan, cut: Cut, b: torch.Tensor, m: torch.Tensor, live: torch.Tensor
) -> torch.Tensor | None:
    """B of the adjoint walks of middle and last sequences: those of their segments, composed."""
    runs = [cut.runs[s] for role in ENTERED for s in part.ids[role]]
    if not runs:
        return None
    chains = tuple(
        tuple((i, i if j else -1, row if i == run[0] else -1) for j, i in enumerate(reversed(run)))
        for row, run in enumerate(runs)
    )
    return walks.merge(b, m, chains, len(runs), live=live, transposed=True)
