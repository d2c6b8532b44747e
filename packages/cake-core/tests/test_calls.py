"""What a call's metadata decided is found again for equal metadata, and for nothing else."""

import pytest
import torch

from cake.core.calls import Memo, layouts


def test_equal_metadata_is_equal():
    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    assert layouts(x, None) == layouts(y, None)
    assert hash(layouts(x)) == hash(layouts(y))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(3, 2).T,
        torch.zeros(2, 3).bfloat16(),
        torch.zeros(2, 3, device="meta"),
        None,
    ],
    ids=["shape", "strides", "dtype", "device", "none"],
)
def test_any_difference_tells(other):
    assert layouts(torch.zeros(2, 3)) != layouts(other)


def test_what_is_no_tensor_has_no_layout():
    assert layouts(torch.zeros(2), [1.0]) is None


def test_a_memo_keeps_and_forgets():
    memo: Memo[int] = Memo(most=2)
    assert memo.get("a") is None
    assert memo.keep("a", 1) == 1
    memo.keep("b", 2)
    assert (memo.get("a"), memo.get("b")) == (1, 2)
    memo.keep("c", 3)
    assert memo.get("c") == 3
    assert memo.get("a") is None


def test_a_memo_passes_over_what_can_be_no_key():
    memo: Memo[int] = Memo()
    assert memo.keep([1], 1) == 1
    assert memo.get([1]) is None
