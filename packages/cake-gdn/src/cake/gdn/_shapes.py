"""The forward's stages for tracers: their results' shapes alone, which may be symbolic."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from cake.core import tracing
from cake.gdn._stages import Prep
from cake.gdn.plan import CHUNK, Sequences


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


def made_by(sources: Path, core: Path) -> str:
    """A digest of the sources that decide what a tracer is told of the op.

    It is an argument of the op: torch keeps compiled graphs on disk and finds them by names and arguments,
    so that a graph of another version, with another tape, would be taken for ours.

    Args:
        sources: the op's folder.
        core: cake.core's.
    """
    shared = (core / name for name in ("segments.py", "sequences.py", "tracing.py"))
    digest = hashlib.sha256()
    for path in sorted((*sources.glob("*.py"), *shared), key=lambda path: path.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


MADE_BY = made_by(Path(__file__).parent, Path(str(tracing.__file__)).parent)
