"""Ops under tracers: `torch.compile`, `torch.export`, and dispatch modes (fake tensors, checkpoints).

An eager call launches its kernels directly. Where something traces, it goes through `torch.library` custom
ops instead, which a tracer sees as one node each. The bits are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cake.core import config
from cake.core.checks import check_boundaries
from cake.core.segments import Segments
from cake.core.sequences import CHUNK, Sequences

__all__ = [
    "configured",
    "fake_sequences",
    "host_boundaries",
    "made_by",
    "traced",
    "with_room",
    "with_room_of",
]


def traced() -> bool:
    """Whether a tracer looks at this call. Costs a fraction of a microsecond."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def made_by(sources: Path) -> str:
    """A digest of the sources that decide what a tracer is told of an op, for an argument of the op.

    torch keeps compiled graphs on disk and finds them by names and arguments, so that a graph of another
    version, with another tape, would be taken for ours.

    Args:
        sources: the op's folder.
    """
    shared = (Path(__file__).parent / name for name in ("segments.py", "sequences.py", "tracing.py"))
    digest = hashlib.sha256()
    for path in sorted((*sources.glob("*.py"), *shared), key=lambda path: path.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def configured(op: str, variant: str | None, option: str, given: Any) -> tuple[str, Any]:
    """The variant and the value of one option that a traced call of the op runs.

    A compiled region keeps them, and is compiled again after a `configure` that changes anything of cake's.
    """
    found: tuple[str, Any] = _read(op, variant, option, given, config.stamp)
    return found


def _read(op: str, variant: str | None, option: str, given: Any, stamp: str) -> tuple[str, Any]:
    # `stamp` says nothing here: reading it is what makes a compiled region depend on the configuration.
    return config.variant(op, variant), config.option(op, option, given)


# As torch.compiler.assume_constant_result does it, which would import torch._dynamo: seconds for everybody.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


def host_boundaries(
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | Sequence[int] | None
) -> tuple[torch.Tensor | None, list[int] | None]:
    """A call's two forms of boundaries as a custom op takes them: one tensor, on any device, or a list.

    Raises:
        TypeError, ValueError: as `sequences.of_call`, as far as values aren't needed.
    """
    if cu_seqlens is not None:
        check_boundaries("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is None:
        return cu_seqlens, None
    if isinstance(cu_seqlens_cpu, torch.Tensor):
        check_boundaries("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu must be on the CPU, got {cu_seqlens_cpu.device}")
        return cu_seqlens_cpu, None
    if not isinstance(cu_seqlens_cpu, (list, tuple, range)):
        raise TypeError(
            f"cu_seqlens_cpu must be a CPU tensor or a list of ints, got {type(cu_seqlens_cpu).__name__}"
        )
    return None, list(cu_seqlens_cpu)


def fake_sequences(
    batch: int, tokens: int, cu_seqlens: torch.Tensor | None, boundaries: Sequence[int] | None
) -> Sequences:
    """Sequences of a call whose shapes are known and whose boundaries aren't; sizes may be symbolic.

    Raises:
        ValueError: boundaries with more than one row.
    """
    if cu_seqlens is None and boundaries is None:
        n = batch
    elif batch != 1:
        raise ValueError(f"q must be [1, T, H, 128] with cu_seqlens, got B={batch}")
    else:
        n = (cu_seqlens.shape[0] if boundaries is None else len(boundaries)) - 1  # type: ignore[union-attr]
    room = _room(batch, tokens, n)
    return Sequences(
        batch=batch,
        tokens=tokens,
        boundaries=None,
        cu_device=None,
        n=n,
        chunk_capacity=room,
        boundary_capacity=room,
    )


def with_room(seqs: Sequences) -> Sequences:
    """The same sequences with the room for chunks that `fake_sequences` told the tracer."""
    room = _room(seqs.batch, seqs.tokens, seqs.n)
    return replace(seqs, chunk_capacity=room, boundary_capacity=room)


def with_room_of(cut: Segments, whole: Sequences) -> Segments:
    """Segments with the room of the call's sequences."""
    return replace(cut, chunk_capacity=whole.chunk_capacity, boundary_capacity=whole.boundary_capacity)


def _room(batch: int, tokens: int, n: int) -> int:
    # A bound on the chunks, whatever the boundaries are and however sequences are cut. Never 0 or 1, sizes
    # that a tracer would compile apart.
    return batch * (tokens // CHUNK) + n + 1
