"""The forward's stages for tracers: their results' shapes alone, which may be symbolic."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from cake.core import tracing
from cake.core.sequences import Sequences


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
