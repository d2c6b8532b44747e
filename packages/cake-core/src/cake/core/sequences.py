"""How a call's tokens fall into sequences and chunks: pure functions of shapes and boundaries.

Tokens are numbered flat over the batch, ``t = b * tokens + i``. Every sequence is cut into chunks of `CHUNK`
tokens that restart at its first token; only its last chunk may be shorter. An empty sequence has no chunk.

A tape holds one state per *slot*. The slots of a call are numbered sequence by sequence, so that their number
grows with the tokens and not with the number of sequences:

* the state S before chunk c; without an initial state the one before chunk 0 is zero and has no slot;
* the adjoint R after chunk c; without a gradient of the final state the one after the last chunk has no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

from cake.core.checks import check_boundaries, is_tensor

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK",
    "Sequences",
    "batched",
    "host_values",
    "known_boundaries",
    "of_call",
    "packed",
    "packed_on_device",
]

CHUNK = 64

S = TypeVar("S", bound="Sequences")


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one call.

    batch: rows B of the inputs; 1 for packed sequences.
    tokens: tokens per row.
    boundaries: n + 1 flat token indices, or None where they exist on a device only.
    cu_device: the caller's boundaries on the device, int32 or int64 [n + 1], where `boundaries` is None.
    n: number of sequences.
    chunk_capacity: number of chunks, or a bound on it where `boundaries` is None.
    boundary_capacity: number of chunk boundaries inside sequences, or a bound on it.
    chosen: of a selection (`select`), which leaves tokens out, first flat token and end of each sequence;
        `boundaries` is None then.
    chunk_origin: of a selection, the place of each sequence's first chunk among those of the whole call.
    """

    batch: int
    tokens: int
    boundaries: tuple[int, ...] | None
    cu_device: torch.Tensor | None
    n: int
    chunk_capacity: int
    boundary_capacity: int
    chosen: tuple[tuple[int, int], ...] | None = field(default=None, kw_only=True)
    chunk_origin: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def total(self) -> int:
        """Number of tokens, batch * tokens."""
        return self.batch * self.tokens

    def slots(self, with_edge: bool) -> int:
        """Number of slots of a tape; `with_edge` says whether the outermost state of a sequence has one."""
        return self.chunk_capacity if with_edge else self.boundary_capacity

    def at(self: S, cu_device: torch.Tensor | None) -> S:
        """The same, with the same boundaries in another tensor on the device."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, cu_device=cu_device)
        return made

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First flat token and end of each sequence."""
        return tuple(pairwise(self.host_boundaries())) if self.chosen is None else self.chosen

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(end - start for start, end in self.spans)

    @cached_property
    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks of each sequence."""
        return tuple(-(-length // CHUNK) for length in self.lengths)

    @cached_property
    def chunk_base(self) -> tuple[int, ...]:
        """Chunks of all earlier sequences, for each sequence."""
        return tuple(accumulate(self.chunk_counts, initial=0))[:-1]

    @cached_property
    def nonempty_before(self) -> tuple[int, ...]:
        """Earlier sequences that have tokens, for each sequence."""
        return tuple(accumulate((int(count > 0) for count in self.chunk_counts), initial=0))[:-1]

    @cached_property
    def chunks(self) -> tuple[tuple[int, int, int, int], ...]:
        """Every chunk in order: (sequence, chunk within the sequence, first flat token, tokens)."""
        return tuple(
            (s, c, start + c * CHUNK, min(CHUNK, end - start - c * CHUNK))
            for s, (start, end) in enumerate(self.spans)
            for c in range(self.chunk_counts[s])
        )

    @cached_property
    def chunk_places(self) -> tuple[int, ...]:
        """Place of every chunk among those of the whole call, which is where the call's `prep` has it."""
        origin = self.chunk_base if self.chunk_origin is None else self.chunk_origin
        return tuple(
            first + c for first, count in zip(origin, self.chunk_counts, strict=True) for c in range(count)
        )

    def state_slot(self, sequence: int, chunk: int, *, with_edge: bool) -> int | None:
        """Slot of the state before `chunk`, or None where that state is zero and has no slot."""
        if with_edge:
            return self.chunk_base[sequence] + chunk
        if chunk == 0:
            return None
        return self.chunk_base[sequence] - self.nonempty_before[sequence] + chunk - 1

    def adjoint_slot(self, sequence: int, chunk: int, *, with_edge: bool) -> int | None:
        """Slot of the adjoint after `chunk`, or None where that adjoint is zero and has no slot."""
        if with_edge:
            return self.chunk_base[sequence] + chunk
        if chunk == self.chunk_counts[sequence] - 1:
            return None
        return self.chunk_base[sequence] - self.nonempty_before[sequence] + chunk

    def host_boundaries(self) -> tuple[int, ...]:
        """`boundaries`, where they are known.

        Raises:
            RuntimeError: they exist on a device only, or a selection has none.
        """
        if self.chosen is not None:
            raise RuntimeError("a selection of sequences has spans and no boundaries")
        if self.boundaries is None:
            raise RuntimeError("the boundaries of this call exist on a device only and are never read back")
        return self.boundaries

    def select(self, ids: Sequence[int]) -> Sequences:
        """Some of the sequences, in this order, over the same flat tokens: walks of them skip the rest.

        Raises:
            RuntimeError: the boundaries exist on a device only.
        """
        lengths = [self.lengths[s] for s in ids]
        chunks = sum(-(-length // CHUNK) for length in lengths)
        origin = self.chunk_base if self.chunk_origin is None else self.chunk_origin
        return Sequences(
            batch=self.batch,
            tokens=self.tokens,
            boundaries=None,
            cu_device=None,
            n=len(lengths),
            chunk_capacity=chunks,
            boundary_capacity=chunks - sum(length > 0 for length in lengths),
            chosen=tuple(self.spans[s] for s in ids),
            chunk_origin=tuple(origin[s] for s in ids),
        )


@lru_cache(maxsize=16)
def batched(batch: int, tokens: int) -> Sequences:
    """Sequences of a batch: `batch` rows of `tokens` tokens each."""
    per_row = -(-tokens // CHUNK)
    bounds = tuple(range(0, batch * tokens + 1, tokens)) if tokens else (0,) * (batch + 1)
    return Sequences(
        batch=batch,
        tokens=tokens,
        boundaries=bounds,
        cu_device=None,
        n=batch,
        chunk_capacity=batch * per_row,
        boundary_capacity=batch * max(per_row - 1, 0),
    )


def packed(boundaries: Sequence[int], tokens: int, *, name: str = "boundaries") -> Sequences:
    """Packed sequences with boundaries known on the host. The result depends on their values alone.

    Raises:
        ValueError: fewer than two boundaries, a first one that isn't 0, a decreasing one, or a last one that
            isn't `tokens`; the message calls them `name`.
    """
    bounds = tuple(boundaries)
    if len(bounds) < 2:
        raise ValueError(f"{name} must hold N + 1 >= 2 boundaries, got {len(bounds)}")
    if bounds[0] != 0:
        raise ValueError(f"{name} must start at 0, got {bounds[0]}")
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {start} and then {end} at index {i + 1}")
    if bounds[-1] != tokens:
        raise ValueError(f"{name} must end at T={tokens}, got {bounds[-1]}")
    return _packed(bounds)


@lru_cache(maxsize=16)
def _packed(bounds: tuple[int, ...]) -> Sequences:
    lengths = [end - start for start, end in pairwise(bounds)]
    chunks = sum(-(-length // CHUNK) for length in lengths)
    return Sequences(
        batch=1,
        tokens=bounds[-1],
        boundaries=bounds,
        cu_device=None,
        n=len(lengths),
        chunk_capacity=chunks,
        boundary_capacity=chunks - sum(length > 0 for length in lengths),
    )


def packed_on_device(cu_device: torch.Tensor, tokens: int) -> Sequences:
    """Packed sequences with boundaries on a device only: nothing is read back, so capacities are bounds."""
    n = cu_device.shape[0] - 1
    return Sequences(
        batch=1,
        tokens=tokens,
        boundaries=None,
        cu_device=cu_device,
        n=n,
        chunk_capacity=tokens // CHUNK + n,
        boundary_capacity=tokens // CHUNK,
    )


def of_call(
    batch: int,
    tokens: int,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
) -> Sequences:
    """The sequences of a call that takes flash-linear-attention's two forms of boundaries.

    Without either every row of the batch is a sequence. `cu_seqlens_cpu` is used where both are given, and a
    CPU tensor as `cu_seqlens` is used as `cu_seqlens_cpu`. Values on a device are never read back.

    Args:
        batch, tokens: rows and tokens per row of the call's inputs.
        device: of the call's inputs.
        cu_seqlens: N + 1 boundaries, int32 or int64, on `device` or the CPU.
        cu_seqlens_cpu: N + 1 boundaries as a CPU tensor or a list of ints.

    Raises:
        TypeError: not a tensor, or not a list of ints.
        ValueError: boundaries with more than one row, of a wrong shape, dtype or device, or that don't fit.
    """
    if cu_seqlens is None and cu_seqlens_cpu is None:
        return batched(batch, tokens)
    if batch != 1:
        raise ValueError(f"q must be [1, T, H, 128] with cu_seqlens, got B={batch}")
    if cu_seqlens is not None:
        check_boundaries("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        bounds = host_values("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens is not None and cu_seqlens.shape[0] != len(bounds):
            raise ValueError(
                f"cu_seqlens must have as many values as cu_seqlens_cpu, {len(bounds)}, "
                f"got {cu_seqlens.shape[0]}"
            )
        return packed(bounds, tokens, name="cu_seqlens_cpu")
    assert cu_seqlens is not None
    if cu_seqlens.device.type == "cpu":
        return packed(cu_seqlens.tolist(), tokens, name="cu_seqlens")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens must be on {device} or the CPU, got {cu_seqlens.device}")
    if not cu_seqlens.is_contiguous():
        raise ValueError(f"cu_seqlens must be contiguous, got stride {cu_seqlens.stride(0)}")
    return packed_on_device(cu_seqlens, tokens)


def known_boundaries(
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | Sequence[int] | None
) -> tuple[int, ...] | None:
    """The boundaries of a call if the host knows them, else None. Whether they fit the call isn't asked.

    Raises:
        TypeError, ValueError: as `host_values`.
    """
    if cu_seqlens_cpu is not None:
        return tuple(host_values("cu_seqlens_cpu", cu_seqlens_cpu))
    if cu_seqlens is None or cu_seqlens.device.type != "cpu":
        return None
    return tuple(host_values("cu_seqlens", cu_seqlens))


def host_values(name: str, x: Any) -> list[int]:
    """Boundaries on the host, a CPU tensor or a list of ints, as ints; errors call them `name`.

    Raises:
        TypeError: neither a tensor nor a list.
        ValueError: on a device, more than one row, of a wrong dtype, or not ints.
    """
    if is_tensor(x):
        if x.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, got {x.device}")
        check_boundaries(name, x)
        values: list[int] = x.tolist()
        return values
    if not isinstance(x, (list, tuple, range)):
        raise TypeError(f"{name} must be a CPU tensor or a list of ints, got {type(x).__name__}")
    try:
        return [index(value) for value in x]
    except TypeError:
        kinds = sorted({type(value).__name__ for value in x})
        raise ValueError(f"{name} must hold ints, got {', '.join(kinds)}") from None
