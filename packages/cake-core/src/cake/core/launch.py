"""Around an op's stages: the device and precision they run in, and layouts that kernels can load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["ALIGNMENT", "allocator", "is_aligned", "loadable", "running_on", "stream_of"]

#: CUDA kernels load 16 bytes at a time.
ALIGNMENT = 16


def is_aligned(x: torch.Tensor) -> bool:
    """Whether kernels can load x as it lies: last dimension contiguous, all the rest at 16 bytes."""
    size = x.element_size()
    return (
        x.stride(-1) == 1
        and x.data_ptr() % ALIGNMENT == 0
        and all(
            stride * size % ALIGNMENT == 0
            for stride, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if extent > 1
        )
    )


def stream_of(device: torch.device) -> int:
    """The handle of the current stream of a GPU.

    Asked of torch at every call: a stream context or the autograd thread may have another one by now.
    """
    return (
        int(torch.cuda.current_stream(device).cuda_stream)
        if _raw_stream is None
        else _raw_stream(device.index)
    )


# What compiled Triton kernels ask too: a tenth of the time of an object with the handle in it.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


Allocator = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def allocator(device: torch.device) -> Allocator:
    """`torch.empty_strided` of (size, strides, dtype) on a device, in this thread now.

    On the current GPU that is what compiled code allocates with, which doesn't go through PyTorch's
    dispatcher.
    """
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)
    plain: Allocator = _guards._empty_strided_cuda if device.type == "cuda" else _guards._empty_strided_cpu
    return plain


_guards: Any = torch._C._dynamo.guards


def loadable(x: torch.Tensor) -> torch.Tensor:
    """x as it lies, or a contiguous copy where its last dimension is expanded or strided.

    For gradients that autograd hands in, whose layout nobody chose. On a GPU also a copy of what isn't
    aligned.
    """
    if (
        x.is_contiguous()
        and x.data_ptr() % ALIGNMENT == 0
        and x.shape[-1] * x.element_size() % ALIGNMENT == 0
    ):
        return x
    plain = is_aligned(x) if x.device.type == "cuda" else x.stride(-1) == 1
    return x if plain else x.clone(memory_format=torch.contiguous_format)


_NOTHING_TO_CHANGE = contextlib.nullcontext()


def running_on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Around the stages: their own precisions in any autocast region, and the tensors' GPU as current one."""
    autocast = torch.is_autocast_enabled(device.type)
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not autocast and not elsewhere:
        return _NOTHING_TO_CHANGE
    stack = contextlib.ExitStack()
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    if elsewhere:
        stack.enter_context(torch.cuda.device(device))
    return stack
