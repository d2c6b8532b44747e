"""Segments of a call: which it is cut into, and the states where they meet (`cake.core.segments`)."""

from __future__ import annotations

from types import ModuleType

import torch

from cake.core.segments import Segments, cut, cut_unseen, plan, plan_unseen
from cake.gdn._stages import Prep, stages
from cake.gdn.plan import Sequences, packed

# Natural log of the decay below which a state is taken to be gone. e^-20 is 2e-9: less than fp32 sees of a
# state beside another of its size. fast may see less.
LEAST = {"det": -20.0, "fast": -10.0}


def segments_of(
    seqs: Sequences, v_heads: int, backend: str, segments: int | None, packing_invariant: bool
) -> Segments | None:
    """The segments of a call, or None where it isn't cut; arguments as of `chunk_gated_delta_rule`.

    Raises:
        NotImplementedError: they were asked for, and the backend has no pre-scan.
        ValueError: boundaries of several sequences that exist on a device only, where they have to be known.
    """
    asked = {"segments": (segments or 1) > 1, "packing_invariant": packing_invariant}
    if not hasattr(stages(backend), "transfer"):
        for name, given in asked.items():
            if given:
                raise NotImplementedError(f"{name} isn't served by the {backend} backend")
        return None
    whole = seqs
    if seqs.boundaries is None:
        if seqs.n > 1:
            for name, given in asked.items():
                if given:
                    raise ValueError(f"{name} needs the boundaries on the host: give cu_seqlens_cpu")
            length = plan_unseen(seqs.tokens, seqs.n, v_heads) if segments is None else None
            return None if length is None else cut_unseen(seqs, length)
        whole = packed((0, seqs.total), seqs.total)
    counts = plan(whole.chunk_counts, v_heads, segments=segments, packing_invariant=packing_invariant)
    return cut(whole, counts) if max(counts) > 1 else None


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
    least: float | None,
) -> torch.Tensor:
    """The adjoint state that meets each segment at its end."""
    m, live = maps
    b = run.adj_transfer(q, k, do, beta, prep, segments, live, scale=scale, dht=dht, least=least)
    states: torch.Tensor = run.chain(b, m, live, prep, segments, adjoint=True)
    return states
