"""How torch twins of kernels lay tokens out: chunks gathered into padded tiles that are worked on at once.

Data movement alone: nothing here rounds, but for the conversion of bf16 to fp32, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from cake.core.sequences import CHUNK, Sequences

__all__ = ["TILE", "Group", "Tile", "blocks", "groups"]

# Chunks times heads worked on at once, 64 x 128 fp32 values each: what a core's cache holds, or fills a GPU.
TILE = {"cpu": 32, "cuda": 4096}


class Tile:
    """Chunks that are worked on at once, gathered from flat tokens into padded rows and stored back."""

    def __init__(
        self, start: torch.Tensor, rows: torch.Tensor, full: bool, span: tuple[int, int] | None = None
    ):
        """
        start, rows: int64 [count], first flat token and tokens of each chunk.
        full: every chunk has 64 tokens.
        span: for consecutive chunks, their range in the plan's order.
        """
        local = torch.arange(CHUNK, device=start.device)
        self.count = start.shape[0]
        self.index = start[:, None] + torch.minimum(local, rows[:, None] - 1)
        self.pad = None if full else local >= rows[:, None]
        self.tokens = self.unpad(self.index.flatten(), 0)
        self.span = span

    @property
    def first(self) -> int:
        """First flat token of a tile of consecutive chunks."""
        return int(self.index[0, 0])

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[total, h, d] -> fp32 [count, h, 64, d], padded with 0."""
        x = x[self.index].float().transpose(1, 2)
        return x.contiguous() if self.pad is None else x.masked_fill(self.pad[:, None, :, None], 0)

    def vectors(self, x: torch.Tensor) -> torch.Tensor:
        """[total, h] -> fp32 [count, h, 64], padded with 0."""
        x = x[self.index].float().transpose(1, 2)
        return x.contiguous() if self.pad is None else x.masked_fill(self.pad[:, None, :], 0)

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [h, total] -> [count, h, 64], padded with the last value of the chunk."""
        return x[:, self.index].transpose(0, 1)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """[h, total, d] -> fp32 [count, h, 64, d], padded with 0."""
        x = x[:, self.index].float().transpose(0, 1)
        return x if self.pad is None else x.masked_fill(self.pad[:, None, :, None], 0)

    def states(self, tape: torch.Tensor, seqs: Sequences, edge: bool, *, after: bool) -> torch.Tensor:
        """The tape's states of consecutive chunks, fp32 [count, h, V, K]; 0 where a state has no slot."""
        assert self.span is not None
        find = seqs.adjoint_slot if after else seqs.state_slot
        slots = [find(s, c, with_edge=edge) for s, c, _, _ in seqs.chunks[slice(*self.span)]]
        x = tape.new_zeros((self.count, *tape.shape[1:]), dtype=torch.float32)
        here = [i for i, slot in enumerate(slots) if slot is not None]
        if here:
            x[here] = tape[[slot for slot in slots if slot is not None]].float()
        return x

    def unpad(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Drops the padded rows of a dimension that runs over chunks and rows."""
        return x if self.pad is None else x.index_select(dim, (~self.pad).flatten().nonzero().squeeze(1))

    def store(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes [count, h, 64, ...] to the tile's tokens of x [total, h, ...]."""
        x[self.tokens] = self.unpad(rows.transpose(1, 2).flatten(0, 1), 0).to(x.dtype)


class Group:
    """Sequences that are walked together, longest first: those that still have a chunk c are a prefix."""

    def __init__(self, seqs: Sequences, members: list[int], device: torch.device):
        starts, lengths = [start for start, _ in seqs.spans], seqs.lengths
        self.members = members
        self.counts = [seqs.chunk_counts[s] for s in members]
        self._full = [lengths[s] // CHUNK for s in members]
        self.ids = torch.tensor(members, device=device)
        self._start = torch.tensor([starts[s] for s in members], device=device)
        self._length = torch.tensor([lengths[s] for s in members], device=device)
        base = [seqs.chunk_base[s] for s in members]
        self._base = torch.tensor(base, device=device)
        origin = seqs.chunk_base if seqs.chunk_origin is None else seqs.chunk_origin
        self._origin = torch.tensor([origin[s] for s in members], device=device)
        self._inner_base = torch.tensor(
            [b - seqs.nonempty_before[s] for b, s in zip(base, members, strict=True)], device=device
        )

    def active(self, chunk: int) -> int:
        """Number of sequences that have chunk `chunk`."""
        return sum(count > chunk for count in self.counts)

    def steps(self, reverse: bool = False) -> Iterator[tuple[int, Tile]]:
        """(c, tile of the c-th chunks of the sequences that have one)."""
        order = range(max(self.counts, default=0))
        for chunk in reversed(order) if reverse else order:
            count = self.active(chunk)
            rows = (self._length[:count] - chunk * CHUNK).clamp_max(CHUNK)
            full = all(whole > chunk for whole in self._full[:count])
            yield chunk, Tile(self._start[:count] + chunk * CHUNK, rows, full)

    def chunks(self, chunk: int, count: int) -> torch.Tensor:
        """Place in the whole call of the first `count` sequences' chunk `chunk`, int64 [count]."""
        return self._origin[:count] + chunk

    def slots(self, chunk: int, count: int, edge: bool, *, after: bool) -> torch.Tensor:
        """Tape slots of the states before (after) the `chunk`-th chunks of the first `count` sequences."""
        if edge:
            return self._base[:count] + chunk
        return self._inner_base[:count] + (chunk if after else chunk - 1)


def groups(
    seqs: Sequences, heads: int, device: torch.device, members: Iterable[int] | None = None
) -> Iterator[Group]:
    """Every sequence (of `members`) once, the longest first, as many at a time as make a tile."""
    order = sorted(range(seqs.n) if members is None else members, key=lambda s: -seqs.chunk_counts[s])
    size = max(1, TILE[device.type] // heads)
    for first in range(0, len(order), size):
        yield Group(seqs, order[first : first + size], device)


def blocks(seqs: Sequences, heads: int, device: torch.device) -> Iterator[Tile]:
    """Every chunk once, in order: tiles of consecutive chunks."""
    size = max(1, TILE[device.type] // heads)
    for first in range(0, len(seqs.chunks), size):
        block = seqs.chunks[first : first + size]
        start = torch.tensor([x[2] for x in block], device=device)
        rows = torch.tensor([x[3] for x in block], device=device)
        yield Tile(start, rows, all(x[3] == CHUNK for x in block), (first, first + len(block)))
