"""Where the twins' walks get their first states from, and where they leave their last ones."""

from __future__ import annotations

import torch

from cake.core.segments import Segments
from cake.core.sequences import CHUNK, Sequences
from cake.core.tiles import Group

__all__ = ["Edges"]

LOG2E = 1.4426950408889634
#: Natural log of the decay that a chunk counts for at most where every channel has its own. Its slowest
#: channel's says how little of a state stays where it is; some of it moves from channel to channel meanwhile.
LEAST_CHUNK = -5.0


class Edges:
    """States of a call with plain sequences or with segments; `shape` is that of one, [HV, K, V].

    A state that belongs to a sequence has a row for each sequence, one that belongs to a segment a row for
    each segment. Plain sequences are each other's neighbours nowhere; for `transfer`, each is a map of its
    own.
    """

    def __init__(self, seqs: Sequences, shape: tuple[int, int, int]):
        self._shape, self._spans = shape, seqs.spans
        self.segments = seqs if isinstance(seqs, Segments) else None
        self._n = seqs.n if self.segments is None else self.segments.whole.n

    @property
    def followed(self) -> list[int] | None:
        """Whose maps are needed forward; None for all."""
        cut = self.segments
        return None if cut is None else [s for s in range(cut.n) if cut.followed[s]]

    @property
    def opened(self) -> list[int] | None:
        """Whose maps are needed backward; None for all."""
        cut = self.segments
        return None if cut is None else [s for s in range(cut.n) if cut.opens[s]]

    @property
    def mapped(self) -> list[int] | None:
        """Which have an M: the neighbours on both sides need it; None for all."""
        cut = self.segments
        return None if cut is None else [s for s in range(cut.n) if cut.opens[s] and cut.followed[s]]

    def on_tape(self, edge: torch.Tensor | None) -> bool:
        """Whether a tape has a slot for the outermost states."""
        return edge is not None or self.segments is not None

    def empty(self, like: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """fp32 [rows, *shape], by default a row for each sequence."""
        return like.new_empty((self._n if rows is None else rows, *self._shape), dtype=torch.float32)

    def opens(self, group: Group) -> torch.Tensor:
        """bool [count]: whether each one's entering state isn't the sequence's own."""
        return self._flags(group, None if self.segments is None else self.segments.opens)

    def goes_on(self, group: Group) -> torch.Tensor:
        """bool [count]: whether each one's leaving adjoint isn't the sequence's own."""
        return self._flags(group, None if self.segments is None else self.segments.followed)

    def before(
        self, group: Group, own: torch.Tensor | None, inner: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """The state that enters each one: `own` of its sequence, or `inner` of the segment; None is zero."""
        return self._edge(group, own, inner, like, self.segments.opens if self.segments else None)

    def after(
        self, group: Group, own: torch.Tensor | None, inner: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """The adjoint state that meets each one at its end, alike."""
        return self._edge(group, own, inner, like, self.segments.followed if self.segments else None)

    def store_last(self, group: Group, final: torch.Tensor, state: torch.Tensor) -> None:
        """Keeps the states of those that end a sequence in its row."""
        self._store(group, final, state, self.segments.followed if self.segments else None)

    def store_first(self, group: Group, first: torch.Tensor, state: torch.Tensor) -> None:
        """Keeps the adjoint states of those that begin a sequence in its row."""
        self._store(group, first, state, self.segments.opens if self.segments else None)

    def warm_up(
        self, group: Group, ends: torch.Tensor, least: float | None, *, reverse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many chunks a pre-scan walks, and whether nothing before them can be seen through their decay.

        Args:
            ends: the walks' log2 decays, fp32 [HV, total] or [HV, total, channels]: inclusive sums inside a
                chunk, so that a chunk's last row is its whole decay. Of channels the slowest counts.
            least: natural log of the decay below which a state counts as gone; None for never.
            reverse: count from a segment's first chunk instead of its last one.

        Returns:
            int64 [count, HV], and bool [count, HV].
        """
        heads = self._shape[0]
        chunks = torch.tensor(group.counts, device=ends.device)[:, None].expand(-1, heads).clone()
        faded = torch.zeros(chunks.shape, dtype=torch.bool, device=ends.device)
        if least is None:
            return chunks, faded
        for i, s in enumerate(group.members):
            start, end = self._spans[s]
            if start == end:
                continue
            last = [min(c + CHUNK, end) - 1 for c in range(start, end, CHUNK)]
            steps = ends[:, last if reverse else last[::-1]]
            if steps.dim() == 3:
                steps = steps.amax(-1).clamp_min(LEAST_CHUNK * LOG2E)
            gone = steps.cumsum(1) <= least * LOG2E
            faded[i] = gone.any(1)
            chunks[i] = torch.where(faded[i], gone.int().argmax(1) + 1, chunks[i])
        return chunks, faded

    def _flags(self, group: Group, flags: tuple[bool, ...] | None) -> torch.Tensor:
        values = [flags is None or flags[s] for s in group.members]
        return torch.tensor(values, dtype=torch.bool, device=group.ids.device)

    def _edge(
        self,
        group: Group,
        own: torch.Tensor | None,
        inner: torch.Tensor | None,
        like: torch.Tensor,
        flags: tuple[bool, ...] | None,
    ) -> torch.Tensor:
        state = like.new_zeros((len(group.members), *self._shape), dtype=torch.float32)
        for i, s in enumerate(group.members):
            source, row = (own, s) if flags is None else (inner, s) if flags[s] else (own, self._sequence(s))
            if source is not None:
                state[i] = source[row]
        return state

    def _store(
        self, group: Group, rows: torch.Tensor, state: torch.Tensor, flags: tuple[bool, ...] | None
    ) -> None:
        for i, s in enumerate(group.members):
            if flags is None:
                rows[s] = state[i]
            elif not flags[s]:
                rows[self._sequence(s)] = state[i]

    def _sequence(self, segment: int) -> int:
        assert self.segments is not None
        return self.segments.sequence[segment]
