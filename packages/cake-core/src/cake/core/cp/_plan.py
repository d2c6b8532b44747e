"""What one rank walks, sends and merges: made of the partition, for each direction, without a tensor.

A rank's local sequences have four roles: *alone* (a whole document), *first*, *middle* and *last* of a
chain. The map of a piece is ``S_out = M S_in + B``. The forward sends B of first pieces, [B | M] of middle
ones and merges them into the states that enter middle and last pieces; the backward sends B of the adjoint
walk of last and middle pieces and merges them, with the M of the forward transposed, into the adjoints of
first and middle ones.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cake.core.cp._partition import Partition, Piece
from cake.core.sequences import Sequences
from cake.core.state_chain import Step

__all__ = ["ENTERED", "LEFT", "ROLES", "Chains", "Direction", "Plan", "make_plan"]

ROLES = ("alone", "first", "middle", "last")
#: Roles whose sequences a state enters, and whose sequences an adjoint of the final state enters from behind.
ENTERED, LEFT = ("middle", "last"), ("first", "middle")
Chains = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Direction:
    """One exchange.

    tiles: tiles that every rank sends; 0 where nobody sends.
    b, m: tile of each sender's B, and of each middle piece's M. Senders and receivers are numbered through
        two roles: first then middle or middle then last.
    chains: the merges; tiles are numbered rank by rank.
    receivers: rows of the merge's result.
    """

    tiles: int
    b: tuple[int, ...]
    m: tuple[int, ...]
    chains: Chains
    receivers: int


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's part.

    seqs: its local sequences.
    ids: for each of `ROLES` the sequences that have it.
    collective: whether other ranks take part; else the merges are of the rank's own tiles.
    joined: whether a tile is [B | M], as flash-linear-attention exchanges them, or one of B and M.
    kept: tiles of M that the backward merges with, of those that the forward gathered. Its `chains` number
        them from 0. With `joined` tiles the backward gathers M^T instead.
    digest: of what all ranks must agree on.
    """

    seqs: Sequences
    ids: dict[str, tuple[int, ...]]
    forward: Direction
    backward: Direction
    collective: bool
    joined: bool
    kept: tuple[int, ...]
    digest: int

    @cached_property
    def roles(self) -> dict[str, Sequences | None]:
        """The sequences of each role by themselves, None where there are none."""
        return {role: self.seqs.select(ids) if ids else None for role, ids in self.ids.items()}


@lru_cache(maxsize=64)
def make_plan(partition: Partition, rank: int, even: bool) -> Plan:
    """The plan of one rank; `even`: with as many tiles in one exchange as in the other."""
    collective = partition.crosses
    forward_b: dict[Piece, int] = {}
    forward_m: dict[Piece, int] = {}
    backward_b: dict[Piece, int] = {}
    role = dict.fromkeys((piece for local in partition.pieces for piece in local), "alone")
    for chain in partition.chains:
        role |= dict.fromkeys(chain, "middle") | {chain[0]: "first", chain[-1]: "last"}
    used = {"forward": [0] * partition.world_size, "backward": [0] * partition.world_size}

    def tile(direction: str, piece: Piece) -> int:
        used[direction][piece.rank] += 1
        return used[direction][piece.rank] - 1

    for piece, its in role.items():
        if its in ("first", "middle"):
            forward_b[piece] = tile("forward", piece)
        if its == "middle":
            forward_m[piece] = tile("forward", piece)
        if its in ("middle", "last"):
            backward_b[piece] = tile("backward", piece)
    tiles = {name: max(counts) for name, counts in used.items()}
    if even:
        tiles = dict.fromkeys(tiles, max(tiles.values()))

    def place(direction: str, piece: Piece, local: dict[Piece, int]) -> int:
        return local[piece] + (piece.rank * tiles[direction] if collective else 0)

    mine = {name: [p for p in partition.pieces[rank] if role[p] == name] for name in ROLES}
    rows = {piece: row for row, piece in enumerate(mine["middle"] + mine["last"])}
    adjoint_rows = {piece: row for row, piece in enumerate(mine["first"] + mine["middle"])}
    chains: list[tuple[Step, ...]] = []
    adjoint_chains: list[tuple[Step, ...]] = []
    kept: dict[int, int] = {}
    for chain in partition.chains:
        if reached := max((i for i, piece in enumerate(chain) if piece in rows), default=0):
            chains.append(
                tuple(
                    (
                        place("forward", piece, forward_b),
                        place("forward", piece, forward_m) if piece in forward_m else -1,
                        rows.get(chain[i + 1], -1),
                    )
                    for i, piece in enumerate(chain[:reached])
                )
            )
        least = min((i for i, piece in enumerate(chain) if piece in adjoint_rows), default=len(chain))
        if least < len(chain):
            steps = []
            for i in range(len(chain) - 1, least, -1):
                piece = chain[i]
                m = -1
                if piece in forward_m:
                    m = kept.setdefault(place("forward", piece, forward_m), len(kept))
                steps.append((place("backward", piece, backward_b), m, adjoint_rows.get(chain[i - 1], -1)))
            adjoint_chains.append(tuple(steps))

    seqs = partition.sequences(rank)
    return Plan(
        seqs=seqs,
        ids={name: tuple(piece.index for piece in pieces) for name, pieces in mine.items()},
        forward=Direction(
            tiles=tiles["forward"],
            b=tuple(forward_b[piece] for piece in mine["first"] + mine["middle"]),
            m=tuple(forward_m[piece] for piece in mine["middle"]),
            chains=tuple(chains),
            receivers=len(rows),
        ),
        backward=Direction(
            tiles=tiles["backward"],
            b=tuple(backward_b[piece] for piece in mine["middle"] + mine["last"]),
            m=(),
            chains=tuple(adjoint_chains),
            receivers=len(adjoint_rows),
        ),
        collective=collective,
        joined=False,
        kept=tuple(kept),
        digest=zlib.crc32(repr((partition.boundaries, partition.fragments)).encode()),
    )
