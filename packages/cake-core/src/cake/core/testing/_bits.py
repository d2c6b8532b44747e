"""Bitwise equality of tensors, and what differs first when they are not equal."""

from __future__ import annotations

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise_equal(name: str, actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Assert that two tensors hold the same bits: same shape, dtype and every bit of every element.

    Stricter than ``torch.equal``: a NaN equals a NaN of the same payload and no other, and -0.0 is not 0.0.
    Strides and devices may differ. None (a gradient that wasn't asked for) equals None alone.

    Args:
        name: What the tensors are, for the message.
        actual: Any dtype of 1, 2, 4, 8 or 16 bytes per element.
        expected: The other one.

    Raises:
        AssertionError: They differ; the message holds the number of differing elements, and the first one's
            coordinate (in row-major order), both values and both bit patterns.
    """
    if actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(
                f"{name}: one is None: {_describe(actual)} against expected {_describe(expected)}"
            )
        return
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: {_describe(actual)} against expected {_describe(expected)}")
    actual, expected = actual.detach(), expected.detach()
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    differs = _bits(actual) != _bits(expected)
    if differs.dim() > actual.dim():
        differs = differs.any(-1)
    count = int(torch.count_nonzero(differs))
    if count == 0:
        return
    flat = int(differs.reshape(-1).to(torch.uint8).argmax())
    where = []
    for size in reversed(actual.shape):
        where.append(flat % size)
        flat //= size
    at = tuple(reversed(where))
    raise AssertionError(
        f"{name}: {count} of {actual.numel()} elements differ; the first is at {list(at)}: "
        f"{_value(actual[at])} against expected {_value(expected[at])} "
        f"({actual.dtype}, shape {list(actual.shape)})"
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their size; complex ones get a last axis of two."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg().view(_INTEGER_OF_SIZE[x.element_size()])


def _value(x: torch.Tensor) -> str:
    width = 2 * x.element_size()
    if x.is_complex():
        return repr(x.item())
    return f"{x.item()!r} (0x{int(_bits(x)) & (1 << 4 * width) - 1:0{width}x})"


def _describe(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} {list(x.shape)}"
