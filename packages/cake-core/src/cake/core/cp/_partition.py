"""Which rank holds which tokens, and who needs whose state: functions of boundaries and the world's size.

A *fragment* is a range of global tokens that lies in one piece on a rank. Cut at the ends of documents and
joined where a document goes on, a rank's fragments become its local *pieces*: the sequences of its calls.
The pieces of a document in the order of its tokens are a *chain*, whatever ranks they lie on; every piece
but the last passes its state on, every piece but the first needs one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from cake.core.sequences import Sequences, packed

__all__ = ["LAYOUTS", "ConvBoundary", "Partition", "Piece", "partition"]

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")
Fragments = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Piece:
    """Tokens of one document that follow each other on one rank.

    document: index of the document.
    start, end: its global tokens.
    rank: where it lies.
    index: among the rank's pieces.
    offset: its first local token.
    """

    document: int
    start: int
    end: int
    rank: int
    index: int
    offset: int


@dataclass(frozen=True)
class ConvBoundary:
    """What a causal convolution over one local sequence has to be given from elsewhere.

    tokens: tokens of the same document right before the sequence that the kernel reaches, at most its size -
        1.
    sources: where they are, in token order: (rank, first local token there, number of tokens).
    """

    tokens: int
    sources: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class Partition:
    """Where every token of a pack lies.

    boundaries: N + 1 global boundaries of the documents.
    fragments: for each rank its ranges of global tokens in local order.
    pieces: for each rank its local sequences in local order.
    """

    boundaries: tuple[int, ...]
    fragments: Fragments
    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.fragments)

    @cached_property
    def chains(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of every document that has several, in the order of its tokens."""
        by_document = defaultdict(list)
        for local in self.pieces:
            for piece in local:
                by_document[piece.document].append(piece)
        chains = (sorted(by_document[d], key=lambda piece: piece.start) for d in sorted(by_document))
        return tuple(tuple(chain) for chain in chains if len(chain) > 1)

    @cached_property
    def crosses(self) -> bool:
        """Whether any document lies on several ranks: whether ranks have anything to say to each other."""
        return any(len({piece.rank for piece in chain}) > 1 for chain in self.chains)

    def local_boundaries(self, rank: int) -> tuple[int, ...]:
        """Boundaries of a rank's local sequences, from 0 to its number of tokens."""
        pieces = self.pieces[rank]
        if not pieces:
            return (0, 0)
        return (0, *(piece.offset + piece.end - piece.start for piece in pieces))

    def sequences(self, rank: int) -> Sequences:
        """A rank's local sequences."""
        bounds = self.local_boundaries(rank)
        return packed(bounds, bounds[-1])

    def conv_boundaries(self, rank: int, kernel_size: int) -> tuple[ConvBoundary, ...]:
        """For each of a rank's local sequences, what a causal convolution needs from before it."""
        return tuple(self._conv_boundary(piece, kernel_size - 1) for piece in self.pieces[rank])

    def _conv_boundary(self, piece: Piece, reach: int) -> ConvBoundary:
        first = max(self.boundaries[piece.document], piece.start - reach)
        sources = []
        for other in self._chain_of.get(piece.document, ()):
            start, end = max(other.start, first), min(other.end, piece.start)
            if start < end:
                sources.append((other.rank, other.offset + start - other.start, end - start))
        return ConvBoundary(tokens=piece.start - first, sources=tuple(sources))

    @cached_property
    def _chain_of(self) -> dict[int, tuple[Piece, ...]]:
        return {chain[0].document: chain for chain in self.chains}


@lru_cache(maxsize=64)
def partition(
    boundaries: tuple[int, ...], world_size: int, layout: str, fragments: Fragments | None
) -> Partition:
    """The partition of a pack over `world_size` ranks, by one of `LAYOUTS` or by explicit fragments.

    Raises:
        ValueError: an unknown layout, tokens that don't divide as the layout needs, or fragments that don't
            hold every token exactly once.
    """
    if fragments is None:
        fragments = _fragments(boundaries, world_size, layout)
    else:
        if layout != LAYOUTS[0]:
            raise ValueError(f"layout must be left out with fragments, got {layout!r}")
        _check(fragments, world_size, boundaries[-1])
    pieces = tuple(_pieces(boundaries, rank, ranges) for rank, ranges in enumerate(fragments))
    return Partition(boundaries=boundaries, fragments=fragments, pieces=pieces)


def _fragments(boundaries: tuple[int, ...], world_size: int, layout: str) -> Fragments:
    total = boundaries[-1]
    if layout == "contiguous":
        size = _share(total, world_size, "tokens", "the world size")
        return tuple(((rank * size, (rank + 1) * size),) for rank in range(world_size))
    if layout == "zigzag":
        size = _share(total, 2 * world_size, "tokens", "twice the world size")
        return tuple(_front_and_back(0, size, rank, world_size) for rank in range(world_size))
    if layout == "zigzag_per_document":
        sizes = [
            _share(end - start, 2 * world_size, f"tokens of document {d}", "twice the world size")
            for d, (start, end) in enumerate(pairwise(boundaries))
        ]
        return tuple(
            tuple(
                fragment
                for start, size in zip(boundaries, sizes, strict=False)
                for fragment in _front_and_back(start, size, rank, world_size)
            )
            for rank in range(world_size)
        )
    raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}")


def _share(tokens: int, parts: int, what: str, why: str) -> int:
    size, rest = divmod(tokens, parts)
    if rest:
        raise ValueError(f"the number of {what} must be a multiple of {why}, {parts}, got {tokens}")
    return size


def _front_and_back(start: int, size: int, rank: int, world_size: int) -> tuple[tuple[int, int], ...]:
    slots = (rank, 2 * world_size - 1 - rank)
    return tuple((start + slot * size, start + (slot + 1) * size) for slot in slots)


def _check(fragments: Fragments, world_size: int, total: int) -> None:
    if len(fragments) != world_size:
        raise ValueError(f"fragments must hold one list for each of {world_size} ranks, got {len(fragments)}")
    ranges = sorted(fragment for local in fragments for fragment in local if fragment[0] != fragment[1])
    for start, end in ranges:
        if not 0 <= start < end <= total:
            raise ValueError(f"fragments must be ranges of tokens from 0 to {total}, got ({start}, {end})")
    reached = 0
    for start, end in ranges:
        if start != reached:
            what = "no rank holds" if start > reached else "several ranks hold"
            raise ValueError(f"fragments must hold every token once, but {what} token {min(start, reached)}")
        reached = end
    if reached != total:
        raise ValueError(f"fragments must hold every token once, but no rank holds token {reached}")


def _pieces(
    boundaries: tuple[int, ...], rank: int, fragments: Sequence[tuple[int, int]]
) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    offset = 0
    for first, last in fragments:
        # The last document that starts here or before and has tokens after: the one that token `first` is in.
        document, start = bisect_right(boundaries, first) - 1, first
        while start < last:
            end = min(last, boundaries[document + 1])
            if start < end:
                before = pieces[-1] if pieces else None
                if before is not None and before.document == document and before.end == start:
                    pieces[-1] = Piece(document, before.start, end, rank, before.index, before.offset)
                else:
                    pieces.append(Piece(document, start, end, rank, len(pieces), offset))
                offset += end - start
            document, start = document + 1, end
    return tuple(pieces)
