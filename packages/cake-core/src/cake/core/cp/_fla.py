"""Any context of a call, flash-linear-attention's included, as the plan of one rank.

A context of theirs (`fla.ops.cp.FLACPContext`) is one rank's view alone: its local boundaries, and for each
*part* (one range of the pack, two under their zigzag layout) how many parts before it and after it share the
document at its edge. Their exchange gathers one tile ``[B | M]`` fp32 [HV, 128, 256] of every part in the
forward and ``[B | M^T]`` in the backward, always and from every rank; ours does the same under such a
context.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cake.core.cp._context import KcpContext, rank_and_world
from cake.core.cp._plan import ROLES, Direction, Plan
from cake.core.cp._untraced import untraced
from cake.core.sequences import Sequences, host_values, packed

__all__ = ["Call", "of_call", "refuse_states"]

_log = logging.getLogger("cake")


def refuse_states(initial_state: torch.Tensor | None, output_final_state: bool) -> None:
    """Refuses what no context serves; asked before anything else, so that every rank says the same.

    Raises:
        ValueError: an initial state, or a final one asked for.
    """
    if initial_state is not None:
        raise ValueError("initial_state must be None under cp_context, got a tensor")
    if output_final_state:
        raise ValueError("output_final_state must be False under cp_context, got True")


@dataclass(frozen=True)
class Call:
    """A call under a context.

    path: "kcp", or "fla" under flash-linear-attention's context.
    plan: what this rank walks, sends and merges.
    group: process group of torch.distributed; None: the default one.
    """

    path: str
    plan: Plan
    group: Any

    def sequences(self, batch: int, tokens: int) -> Sequences:
        """The sequences of the call; the context's boundaries are the ones that count.

        Raises:
            ValueError: inputs that aren't one row of the context's tokens.
        """
        seqs = self.plan.seqs
        if (batch, tokens) != (1, seqs.total):
            raise ValueError(
                f"q must be [1, {seqs.total}, H, 128], this rank's tokens under cp_context, "
                f"got B={batch} and T={tokens}"
            )
        return seqs

    def variant(self, op: str, configured: str) -> str:
        """What runs: under flash-linear-attention's context det, whatever is configured."""
        if self.path == "fla" and configured != "det":
            _log_once(op, configured)
            return "det"
        return configured


@lru_cache(maxsize=64)
def _log_once(op: str, variant: str) -> None:
    _log.info("%s runs det under flash-linear-attention's context, where %s is configured", op, variant)


@dataclass(frozen=True)
class _Part:
    """A range of a pack on one rank: its local sequences, its place among all, and who shares its edges."""

    first: int
    last: int
    place: int
    before: int
    after: int


# A compiled region breaks here: nothing of a context is for a tracer.
@untraced
def of_call(context: Any, device: torch.device) -> Call:
    """What a call on `device` under a context runs.

    Raises:
        TypeError: neither a `KcpContext` nor flash-linear-attention's.
        ValueError: a context that contradicts itself, or of another world than its group's.
    """
    if isinstance(context, KcpContext):
        if rank_and_world(context.group) != (context.rank, context.world_size):
            rank, world_size = rank_and_world(context.group)
            raise ValueError(
                f"cp_context must be one of this group, rank {rank} of {world_size}, "
                f"got rank {context.rank} of {context.world_size}"
            )
        return Call("kcp", context.plan(device.type), context.group)
    if not any(
        base.__name__ == "FLACPContext" and base.__module__.startswith("fla.")
        for base in type(context).__mro__
    ):
        raise TypeError(
            "cp_context must be a KcpContext of build_kcp_context or flash-linear-attention's FLACPContext, "
            f"got {type(context).__name__}"
        )
    return Call("fla", _plan_of(context), context.group)


def _plan_of(context: Any) -> Plan:
    boundaries = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
    bounds = tuple(host_values("cp_context's cu_seqlens_cpu", boundaries))
    rank, world_size = (0, 1) if context.group is None else rank_and_world(context.group)
    layout = getattr(context, "layout", "contiguous")
    if context.group is None:
        return fla_plan(bounds, rank, world_size, layout, (len(bounds) - 1,), (0,), (0,))
    if layout == "contiguous":
        edges = ((context.pre_num_ranks,), (context.post_num_ranks,))
        return fla_plan(bounds, rank, world_size, layout, (len(bounds) - 1,), *edges)
    if layout != "zigzag":
        raise ValueError(f"cp_context's layout must be 'contiguous' or 'zigzag', got {layout!r}")
    front = context.front_num_seqs
    return fla_plan(
        bounds,
        rank,
        world_size,
        layout,
        (front, len(bounds) - 1 - front),
        tuple(context.pre_num_ranks_by_part),
        tuple(context.post_num_ranks_by_part),
    )


@lru_cache(maxsize=64)
def fla_plan(
    bounds: tuple[int, ...],
    rank: int,
    world_size: int,
    layout: str,
    counts: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
) -> Plan:
    """The plan of one rank under a context of flash-linear-attention.

    Args:
        bounds: local boundaries.
        rank, world_size: of the group.
        layout: "contiguous" or "zigzag".
        counts: local sequences of each part.
        before, after: for each part the number of parts before (after) it that hold tokens of the document at
            its start (end).

    Raises:
        ValueError: parts without sequences, or that reach beyond the group.
    """
    parts = len(counts)
    places = (rank, 2 * world_size - 1 - rank)[:parts]
    described, first = [], 0
    for i, place in enumerate(places):
        if counts[i] < 1:
            raise ValueError(f"cp_context must have a sequence in every part, got {counts[i]}")
        if not (0 <= before[i] <= place and 0 <= after[i] <= world_size * parts - 1 - place):
            raise ValueError(
                f"cp_context reaches {before[i]} parts before and {after[i]} after the part {place} "
                f"of {world_size * parts}"
            )
        described.append(_Part(first, first + counts[i] - 1, place, before[i], after[i]))
        first += counts[i]

    def tile(place: int) -> int:
        if place < world_size:
            return place * parts
        return (2 * world_size - 1 - place) * parts + 1

    enters = {part.first: i for i, part in enumerate(described) if part.before}
    leaves = {part.last: i for i, part in enumerate(described) if part.after}
    seqs = packed(bounds, bounds[-1], name="cp_context's cu_seqlens")
    by_edges = {
        (False, False): "alone",
        (False, True): "first",
        (True, True): "middle",
        (True, False): "last",
    }
    role = {s: by_edges[s in enters, s in leaves] for s in range(seqs.n)}
    mine = {name: [s for s in range(seqs.n) if role[s] == name] for name in ROLES}

    def chain(part: _Part, row: int, step: int) -> tuple[tuple[int, int, int], ...]:
        reach = part.before if step > 0 else part.after
        tiles = [tile(part.place - step * i) for i in range(reach, 0, -1)]
        return tuple((t, t if i else -1, row if i == reach - 1 else -1) for i, t in enumerate(tiles))

    entered, left = mine["middle"] + mine["last"], mine["first"] + mine["middle"]
    forward = Direction(
        tiles=parts,
        b=tuple(leaves[s] for s in left),
        m=tuple(leaves[s] for s in mine["middle"]),
        chains=tuple(chain(described[enters[s]], row, 1) for row, s in enumerate(entered)),
        receivers=len(entered),
    )
    backward = Direction(
        tiles=parts,
        b=tuple(enters[s] for s in entered),
        m=tuple(enters[s] for s in mine["middle"]),
        chains=tuple(chain(described[leaves[s]], row, -1) for row, s in enumerate(left)),
        receivers=len(left),
    )
    return Plan(
        seqs=seqs,
        ids={name: tuple(ids) for name, ids in mine.items()},
        forward=forward,
        backward=backward,
        collective=world_size > 1,
        joined=True,
        kept=(),
        digest=0,
    )
