"""What kernels can load, and the device and precision in which stages run."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cake.core.launch import ALIGNMENT, is_aligned, loadable, running_on


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_ends_here(dtype: torch.dtype) -> None:
    device, x = torch.device("cpu"), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=dtype):
        assert (x @ x).dtype == dtype
        with running_on(device):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == dtype
    assert isinstance(running_on(device), contextlib.nullcontext)
