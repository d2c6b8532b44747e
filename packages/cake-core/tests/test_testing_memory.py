import threading

import pytest
import torch

from cake.core.launch import allocator
from cake.core.testing import (
    assert_bitwise_equal,
    end_of_allocation,
    fused_views,
    permuted_view,
    pitched_view,
    poison_,
    poisoned_empty,
    spread_view,
)

ALLOCATORS = {
    "empty": lambda dtype: torch.empty(3, 4, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 4, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 4), (4, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 4),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((3, 4), (4, 1)),
    "of recordings": lambda dtype: allocator(torch.device("cpu"))((3, 4), (4, 1), dtype),
}


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_every_allocator_gives_nan(name, dtype):
    with poisoned_empty():
        x = ALLOCATORS[name](dtype)
    assert x.dtype is dtype
    x = torch.view_as_real(x) if x.is_complex() else x.float()
    assert x.isnan().all()


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_every_allocator_gives_the_largest_integer(name, dtype):
    with poisoned_empty():
        x = ALLOCATORS[name](dtype)
    assert (x == torch.iinfo(dtype).max).all()


def test_functions_come_back_also_after_an_error_and_nested():
    before = [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty]

    def fails():
        with poisoned_empty():
            with poisoned_empty():
                pass
            assert torch.empty(2).isnan().all()
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert [torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty] == before


def test_other_threads_see_it_and_autograd_leaves_too():
    found = []
    with poisoned_empty():
        thread = threading.Thread(target=lambda: found.append(torch.empty(5)))
        thread.start()
        thread.join()
        leaf = torch.empty(2, requires_grad=True)
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.isnan().all()
        assert torch.empty(2, device="meta").is_meta
    assert found[0].isnan().all()


def neighbours(x):
    """What lies just before and just after the elements of x in its storage."""
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole[: x.storage_offset()], whole[last + 1 :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_end_of_allocation_is_between_nans(dtype):
    x = torch.randn(3, 7).to(dtype)
    copy = end_of_allocation(x, guard_bytes=100)
    assert_bitwise_equal("copy", copy, x)
    before, after = neighbours(copy)
    assert before.numel() == after.numel() == 512 // x.element_size()
    assert before.isnan().all()
    assert after.isnan().all()
    assert copy.storage_offset() * copy.element_size() % 512 == 0


def test_end_of_allocation_keeps_strides_and_poisons_the_gaps():
    x = torch.randn(4, 10)[:, ::3]
    copy = end_of_allocation(x)
    assert copy.stride() == x.stride()
    assert_bitwise_equal("copy", copy, x)
    assert copy.as_strided((3,), (1,), copy.storage_offset() + 1)[:2].isnan().all()


def test_end_of_allocation_of_integers_expanded_and_empty_tensors():
    cu = end_of_allocation(torch.tensor([0, 5, 9], dtype=torch.int32))
    assert (neighbours(cu)[1] == torch.iinfo(torch.int32).max).all()
    expanded = torch.randn(1, 3).expand(5, 3)
    assert_bitwise_equal("expanded", end_of_allocation(expanded), expanded)
    assert end_of_allocation(expanded).stride() == (0, 1)
    assert end_of_allocation(torch.empty(0, 4)).shape == (0, 4)


def test_fused_views_share_one_buffer_and_its_gradient():
    q, v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4, 8)
    buffer, (vq, vv) = fused_views(q, v, requires_grad=True)
    assert buffer.shape == (1, 5, 48)
    assert_bitwise_equal("q", vq, q)
    assert_bitwise_equal("v", vv, v)
    assert {x.untyped_storage().data_ptr() for x in (vq, vv)} == {buffer.data_ptr()}
    assert vq.stride() == (240, 48, 8, 1)
    assert not vq.is_contiguous()
    (vq.sum() + 2 * vv.sum()).backward()
    assert (buffer.grad[..., :16] == 1).all()
    assert (buffer.grad[..., 16:] == 2).all()


def test_pitched_view_poisons_the_other_columns():
    beta = torch.rand(1, 6, 4)
    view = pitched_view(beta, 40, offset=3)
    assert_bitwise_equal("beta", view, beta)
    assert view.stride() == (240, 40, 1)
    columns = view.as_strided((6, 40), (40, 1), 0)
    assert columns[:, :3].isnan().all()
    assert columns[:, 7:].isnan().all()
    with pytest.raises(ValueError, match=r"at least offset .* = 7, got 6"):
        pitched_view(beta, 6, offset=3)


def test_permuted_and_spread_views():
    g = torch.randn(2, 6, 4)
    view = permuted_view(g, (2, 0, 1))
    assert_bitwise_equal("g", view, g)
    assert view.stride() == (6, 1, 12)
    wide = spread_view(g, axis=-1, step=2)
    assert_bitwise_equal("g", wide, g)
    assert wide.stride() == (48, 8, 2)
    assert wide.as_strided((4,), (2,), 1).isnan().all()


def test_poison_returns_its_argument():
    x = torch.zeros(3, dtype=torch.bool)
    assert poison_(x) is x
    assert x.all()
