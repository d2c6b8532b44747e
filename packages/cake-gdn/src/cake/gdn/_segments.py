"""The states where the segments of a call meet (`cake.core.segments`)."""

from __future__ import annotations

from types import ModuleType

import torch

from cake.core import segments as planner
from cake.core.segments import LEAST, Cost, Segments
from cake.core.sequences import Sequences
from cake.gdn._stages import Prep

__all__ = ["LEAST", "RATES", "cut_of_call", "entering", "leaving"]

#: What the parts of a call take on an H200.
RATES = Cost(start=4000)


def cut_of_call(
    seqs: Sequences, heads: int, segments: int | None, packing_invariant: bool
) -> Segments | None:
    """`cake.core.segments.cut_of_call` of this op's calls."""
    return planner.cut_of_call(seqs, heads, segments, packing_invariant, rates=RATES, chooses=True)


def entering(
    run: ModuleType,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    segments: Segments,
    initial_state: torch.Tensor | None,
    least: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The state that enters each segment; and the maps M with their flags, which the backward needs again."""
    b, m, live = run.transfer(k, v, beta, prep, segments, initial_state=initial_state, least=least)
    return run.chain(b, m, live, prep, segments), m, live


def leaving(
    run: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    segments: Segments,
    maps: tuple[torch.Tensor, ...],
    dht: torch.Tensor | None,
    scale: float,
    l2norm: bool,
    least: float | None,
) -> torch.Tensor:
    """The adjoint state that meets each segment at its end."""
    m, live = maps
    b = run.adj_transfer(
        q, k, do, beta, prep, segments, live, scale=scale, l2norm=l2norm, dht=dht, least=least
    )
    states: torch.Tensor = run.chain(b, m, live, prep, segments, adjoint=True)
    return states
