"""What kernels can load, and the device and precision in which stages run."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cake.core.launch import ALIGNMENT, allocator, is_aligned, loadable, running_on


def test_alignment() -> None:
    x = torch.zeros(2, 4, 136, dtype=torch.bfloat16)
    assert ALIGNMENT == 16
    assert is_aligned(x)
    assert is_aligned(x[..., :128])
    assert is_aligned(x[..., 8:])
    assert not is_aligned(x[..., 1:])
    assert not is_aligned(x[..., ::2])
    assert not is_aligned(torch.zeros(2, 4, 132, dtype=torch.bfloat16)[..., :128])
    # The stride of an axis of one element is never used.
    assert is_aligned(torch.zeros(1, 1, 132, dtype=torch.bfloat16)[..., :128])


def test_a_copy_only_where_one_is_needed() -> None:
    x = torch.randn(3, 8)
    assert loadable(x) is x
    assert loadable(x[:, :4]).data_ptr() == x.data_ptr()
    for view in (x.T, x[:, :1].expand(-1, 8), x[:, ::2]):
        made = loadable(view)
        assert made.is_contiguous()
        assert torch.equal(made, view)


def check_allocator(device: torch.device) -> None:
    for size, strides in (((3, 4), (4, 1)), ((3, 4), (1, 3)), ((0, 4), (4, 1)), ((), ())):
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            x = allocator(device)(size, strides, dtype)
            assert (x.shape, x.stride(), x.dtype, x.device) == (size, strides, dtype, device)
            assert not x.requires_grad
            assert x.data_ptr() % ALIGNMENT == 0


def test_allocator() -> None:
    check_allocator(torch.device("cpu"))
    with torch.inference_mode():
        assert allocator(torch.device("cpu"))((2,), (1,), torch.float32).is_inference()


@pytest.mark.gpu
def test_allocator_of_the_current_gpu() -> None:
    check_allocator(torch.device("cuda", torch.cuda.current_device()))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the stream's own memory
        x = allocator(torch.device("cuda", torch.cuda.current_device()))((2,), (1,), torch.float32)
    before = x.data_ptr()
    del x
    assert torch.empty(2, device="cuda").data_ptr() != before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_allocator_of_another_gpu() -> None:
    with torch.cuda.device(1):
        check_allocator(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_ends_here(dtype: torch.dtype) -> None:
    device, x = torch.device("cpu"), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=dtype):
        assert (x @ x).dtype == dtype
        with running_on(device):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == dtype
    assert isinstance(running_on(device), contextlib.nullcontext)
