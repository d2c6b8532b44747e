"""The forward's stages for tracers: their results' shapes alone, which may be symbolic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cake.core import tracing
from cake.core.sequences import Sequences

#: The last argument of the op: see `cake.core.tracing.made_by`.
MADE_BY = tracing.made_by(Path(__file__).parent)


def prep(*unused: Any, **more: Any) -> None:
    """See `_stages`; a traced call's backward makes it again, so that nobody looks at its shape."""


def scan(
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: None,
    seqs: Sequences,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    save_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """See `_stages`; K is V."""
    v_heads, dim = v.shape[2:]
    slots = seqs.slots(initial_state is not None)
    return (
        v.new_empty(v.shape),
        v.new_empty((seqs.n, v_heads, dim, dim), dtype=torch.float32) if output_final_state else None,
        v.new_empty((slots, v_heads, dim, dim)) if save_states else None,
    )
