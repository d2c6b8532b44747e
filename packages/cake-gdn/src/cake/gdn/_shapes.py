"""The forward's stages for tracers: their results' shapes alone, which may be symbolic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cake.core import tracing
from cake.gdn._stages import Prep
from cake.gdn.plan import CHUNK, Sequences

#: The last argument of the op: see `cake.core.tracing.made_by`.
MADE_BY = tracing.made_by(Path(__file__).parent)


def prep(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences, *, l2norm: bool) -> Prep:
    """See `_stages`."""
    heads, v_heads, total = k.shape[2], g.shape[2], seqs.total
    return Prep(
        t=k.new_empty((v_heads, total, CHUNK), dtype=torch.bfloat16),
        b=k.new_empty((v_heads, total), dtype=torch.float32),
        rk=k.new_empty((heads, total), dtype=torch.float32),
    )


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    save_states: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `_stages`."""
    v_heads, dim, v_dim = v.shape[2], q.shape[3], v.shape[3]
    slots = (seqs.slots(initial_state is not None), v_heads, v_dim, dim)
    return (
        v.new_empty(v.shape),
        v.new_empty((seqs.n, v_heads, dim, v_dim), dtype=torch.float32) if output_final_state else None,
        v.new_empty(slots) if save_states else None,
    )
