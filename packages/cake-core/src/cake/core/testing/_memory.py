"""Memory that shows a mistake: poisoned allocations, guarded copies and strided views with poisoned gaps."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cake.core import workspace

_ALLOCATORS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    (torch._C._dynamo.guards, "_empty_strided_cpu"),
    (torch._C._dynamo.guards, "_empty_strided_cuda"),
)
_GUARD_BYTES = 4096


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within this context uninitialised memory is filled with values that show when they are used.

    ``torch.empty``, ``torch.empty_like``, ``torch.empty_strided``, ``Tensor.new_empty``,
    ``Tensor.new_empty_strided`` and what recordings and compiled code allocate with fill floating-point
    tensors with NaN and integer ones with the largest value of their type (an index that no tensor has); so
    does ``cake.core.workspace`` with a buffer that it hands out again. It holds for every thread of the
    process, so also for a backward's. Allocations made inside PyTorch's own C++ operators, and functions
    imported by name before (``from torch import empty``), are not seen.
    """
    on_reuse = workspace.POOLS.on_reuse
    saved = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATORS]
    try:
        workspace.POOLS.on_reuse = poison_
        for owner, name, original in saved:
            setattr(owner, name, _poisoning(original))
        yield
    finally:
        workspace.POOLS.on_reuse = on_reuse
        for owner, name, original in saved:
            setattr(owner, name, original)


def poison_(x: torch.Tensor) -> torch.Tensor:
    """Fill ``x`` in place with NaN, or with the largest value of an integer type, and return it."""
    with torch.no_grad():
        if x.device.type == "meta":
            return x
        if x.is_floating_point() or x.is_complex():
            return x.fill_(complex(math.nan, math.nan) if x.is_complex() else math.nan)
        return x.fill_(True if x.dtype is torch.bool else torch.iinfo(x.dtype).max)


def end_of_allocation(x: torch.Tensor, *, guard_bytes: int = _GUARD_BYTES) -> torch.Tensor:
    """A copy of ``x`` that fills an allocation up to poisoned memory: a read past either end gets NaN.

    Shape, strides and values are those of ``x`` and the copy starts at a multiple of 512 bytes; the elements
    before it, after it and in the gaps of its strides are NaN (or the largest integer).

    Args:
        x: Any dtype, device and strides.
        guard_bytes: Poisoned bytes on either side, rounded up to a multiple of 512.

    Returns:
        The copy, detached from any graph.
    """
    guard = -(-guard_bytes // 512) * 512 // x.element_size()
    extent = 0 if x.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    buffer = poison_(torch.empty(guard + extent + guard, dtype=x.dtype, device=x.device))
    view = buffer.as_strided(x.shape, x.stride(), guard)
    # Expanded axes (stride 0) hold one element each: write it once.
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
    view[once].copy_(x.detach()[once])
    return view


def fused_views(
    *tensors: torch.Tensor, requires_grad: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Lay tensors ``[B, T, ...]`` side by side in one buffer, as a fused projection's output holds them.

    Args:
        tensors: Same first two axes, dtype and device; the other axes are flattened into columns.
        requires_grad: The buffer is a leaf of the autograd graph and the views hang on it.

    Returns:
        The buffer ``[B, T, columns]`` and, for each tensor, a view of it with the tensor's shape and values.
    """
    lead = tensors[0].shape[:2]
    columns = [math.prod(x.shape[2:]) for x in tensors]
    buffer = torch.cat([x.detach().reshape(*lead, n) for x, n in zip(tensors, columns, strict=True)], dim=-1)
    buffer.requires_grad_(requires_grad)
    parts = torch.split(buffer, columns, dim=-1)
    return buffer, [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def pitched_view(x: torch.Tensor, pitch: int, *, offset: int = 0) -> torch.Tensor:
    """The values of ``x`` as columns ``offset ...`` of a buffer with ``pitch`` columns, the others poisoned.

    Raises:
        ValueError: The columns don't fit into the pitch.
    """
    if offset + x.shape[-1] > pitch:
        raise ValueError(f"pitch must be at least offset + columns = {offset + x.shape[-1]}, got {pitch}")
    buffer = poison_(torch.empty((*x.shape[:-1], pitch), dtype=x.dtype, device=x.device))
    return buffer.narrow(-1, offset, x.shape[-1]).copy_(x.detach())


def permuted_view(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The values of ``x`` in memory that is contiguous in the axis order given, outermost first."""
    inverse = sorted(range(len(order)), key=lambda axis: order[axis])
    return x.detach().permute(*order).clone(memory_format=torch.contiguous_format).permute(*inverse)


def spread_view(x: torch.Tensor, axis: int = -1, step: int = 2) -> torch.Tensor:
    """The values of ``x`` as each ``step``-th entry along ``axis`` of a larger buffer, the rest poisoned."""
    shape = list(x.shape)
    shape[axis] *= step
    index: list[slice] = [slice(None)] * x.dim()
    index[axis] = slice(None, None, step)
    return poison_(torch.empty(shape, dtype=x.dtype, device=x.device))[tuple(index)].copy_(x.detach())


def _poisoning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison_(original(*args, **kwargs))

    return allocate
