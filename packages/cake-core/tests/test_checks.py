"""Checks name the argument and both sides, accept what is right, and cost little."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from cake.core.checks import (
    check_boundaries,
    check_choice,
    check_count,
    check_number,
    check_saved,
    check_tensor,
    is_tensor,
)

torch = pytest.importorskip("torch")

SHAPE = {"B": 2, "T": 64, "HV": 8}


def test_a_tensor_that_is_right_passes() -> None:
    x = torch.zeros(2, 64, 8)
    check_tensor("g", x, shape=SHAPE, dtypes=(torch.float32, torch.bfloat16), device=torch.device("cpu"))
    check_tensor("g", x, shape={"B": None, "T": 64, "HV": None}, dtypes=torch.float32, last_contiguous=True)
    check_tensor("g", x)
    check_tensor("w", torch.nn.Parameter(x), shape=SHAPE)


@pytest.mark.parametrize("wrong", [None, 3, [1.0], "x"])
def test_something_else_than_a_tensor(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"g must be a torch.Tensor, got {type(wrong).__name__}"):
        check_tensor("g", wrong, shape=SHAPE)


def test_a_tensor_that_is_distributed() -> None:
    """It looks like a tensor, and has no memory at its address."""

    class DTensor(torch.Tensor):
        pass

    with pytest.raises(TypeError, match=r"plain torch\.Tensor, got a DTensor: pass g\.to_local\(\)"):
        check_tensor("g", torch.zeros(2, 64, 8).as_subclass(DTensor), shape=SHAPE)


def test_an_array_is_no_tensor() -> None:
    numpy = pytest.importorskip("numpy")
    assert is_tensor(torch.zeros(2))
    assert not is_tensor(numpy.zeros(2))


def test_counts() -> None:
    assert check_count("segments", True) == 1
    assert check_count("segments", 3, 3) == 3
    with pytest.raises(TypeError, match=r"segments must be an int, got 1\.5"):
        check_count("segments", 1.5)
    with pytest.raises(ValueError, match="segments must be at least 1, got 0"):
        check_count("segments", 0)


@pytest.mark.parametrize(
    ("shape", "wanted", "text"),
    [
        ((2, 64, 4), SHAPE, "beta must be [B, T, HV]=[2, 64, 8], got [2, 64, 4]"),
        ((2, 64), SHAPE, "beta must be [B, T, HV]=[2, 64, 8], got [2, 64]"),
        ((1, 2, 64, 8), SHAPE, "beta must be [B, T, HV]=[2, 64, 8], got [1, 2, 64, 8]"),
        ((), SHAPE, "beta must be [B, T, HV]=[2, 64, 8], got []"),
        ((3, 5), {"T": None, "K": 128}, "beta must be [T, K]=[any, 128], got [3, 5]"),
    ],
)
def test_another_shape(shape: tuple[int, ...], wanted: dict[str, int | None], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_tensor("beta", torch.zeros(shape), shape=wanted)
    assert str(caught.value) == text


def test_another_dtype() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="g must be float32 or bfloat16, got float64"):
        check_tensor("g", x, dtypes=(torch.float32, torch.bfloat16))
    with pytest.raises(TypeError, match="g must be float32, got float64"):
        check_tensor("g", x, dtypes=torch.float32)


def test_another_device() -> None:
    x = torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="g must be on cpu, got meta"):
        check_tensor("g", x, device=torch.device("cpu"))
    check_tensor("g", x, device=x.device)


def test_the_last_axis() -> None:
    x = torch.zeros(4, 6, 8)
    check_tensor("q", x[:, :, 2:5], last_contiguous=True)
    check_tensor("q", x.transpose(0, 1), last_contiguous=True)
    with pytest.raises(ValueError) as caught:
        check_tensor("q", x.transpose(1, 2), last_contiguous=True)
    assert str(caught.value) == (
        "q must have a contiguous last axis (stride 1), got strides (48, 1, 8) for shape [4, 8, 6]"
    )
    with pytest.raises(ValueError, match="got strides"):
        check_tensor("q", torch.zeros(3, 1).expand(3, 4), last_contiguous=True)
    # Where the last axis holds at most one element, or the tensor none, a stride says nothing.
    check_tensor("q", x.transpose(1, 2)[:, :, :1], last_contiguous=True)
    check_tensor("q", x.transpose(1, 2)[:0], last_contiguous=True)


def test_choices() -> None:
    check_choice("layout", "zigzag", ("contiguous", "zigzag"))
    with pytest.raises(ValueError, match="layout must be one of 'contiguous', 'zigzag', got 'zig'"):
        check_choice("layout", "zig", ("contiguous", "zigzag"))


def test_nothing_is_read_or_written() -> None:
    x = torch.zeros(2, 64, 8, device="meta")  # has no values at all
    check_tensor("g", x, shape=SHAPE, dtypes=torch.float32, device=x.device, last_contiguous=True)


def test_a_check_takes_microseconds() -> None:
    x, device, dtypes = torch.zeros(2, 64, 8), torch.device("cpu"), (torch.bfloat16, torch.float32)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            check_tensor(
                "g", x, shape={"B": 2, "T": 64, "HV": 8}, dtypes=dtypes, device=device, last_contiguous=True
            )
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 10e-6  # measured: 1.4 us; the rest is room for a busy machine


def test_importing_the_module_imports_no_torch() -> None:
    code = "import sys, cake.core.checks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers() -> None:
    assert check_number("scale", 2) == 2.0
    for wrong, text in (("1", "str"), (None, "NoneType"), (torch.tensor(1.0), "Tensor")):
        with pytest.raises(TypeError, match=f"scale must be a number, got {text}"):
            check_number("scale", wrong)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be finite"):
            check_number("scale", wrong)


def test_boundaries() -> None:
    check_boundaries("cu", torch.tensor([0, 5]))
    check_boundaries("cu", torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(TypeError, match=r"cu must be a torch.Tensor, got list"):
        check_boundaries("cu", [0, 5])
    for wrong in (torch.tensor([0]), torch.tensor(0), torch.tensor([[0, 5]])):
        with pytest.raises(ValueError, match=r"cu must be \[N \+ 1\] with N >= 1"):
            check_boundaries("cu", wrong)
    with pytest.raises(ValueError, match="cu must be int32 or int64, got float32"):
        check_boundaries("cu", torch.tensor([0.0, 5.0]))


def test_saved_tensors() -> None:
    x = torch.zeros(2, 3)
    check_saved("q", x, (2, 3), torch.float32, x.device)
    for shape, dtype, device in (
        ((3, 2), torch.float32, x.device),
        ((2, 3), torch.bfloat16, x.device),
        ((2, 3), torch.float32, torch.device("meta")),
    ):
        with pytest.raises(RuntimeError, match="the backward's saved q must be"):
            check_saved("q", x, shape, dtype, device)
