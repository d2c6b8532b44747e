"""Checks of a call's arguments, cheap enough for every call; errors name the argument and both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_boundaries",
    "check_choice",
    "check_count",
    "check_number",
    "check_saved",
    "check_tensor",
    "is_tensor",
    "saved_as",
]

_tensor: Any = None


def _tensor_type() -> Any:
    global _tensor
    if _tensor is None:
        import torch

        _tensor = torch.Tensor
    return _tensor


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor of torch's; NumPy's arrays have a `device` and a `dtype` too."""
    return isinstance(x, _tensor or _tensor_type())


def check_tensor(
    name: str,
    x: Any,
    *,
    shape: Mapping[str, int | None] | None = None,
    dtypes: Sequence[torch.dtype] | torch.dtype | None = None,
    device: torch.device | None = None,
    last_contiguous: bool = False,
) -> None:
    """Refuse a tensor that isn't as a call needs it. Reads metadata only: no values, no synchronisation.

    Args:
        name: the argument's name, for messages.
        x: what the caller passed.
        shape: axis name -> size, in order, like ``{"B": 2, "T": 64, "HV": 8}``; None is any size.
        dtypes: the dtypes that are accepted.
        device: the device that it must be on.
        last_contiguous: the last axis must have stride 1 (other strides are free).

    Raises:
        TypeError: not a tensor, one that is distributed (its memory isn't its own), or another dtype.
        ValueError: another shape, device or stride.
    """
    if not isinstance(x, _tensor or _tensor_type()):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if type(x).__name__ == "DTensor":
        raise TypeError(f"{name} must be a plain torch.Tensor, got a DTensor: pass {name}.to_local()")
    if shape is not None:
        sizes = x.shape
        if len(sizes) != len(shape):
            _wrong_shape(name, shape, sizes)
        for size, wanted in zip(sizes, shape.values(), strict=True):
            if wanted is not None and size != wanted:
                _wrong_shape(name, shape, sizes)
    if dtypes is not None:
        dtype = x.dtype
        if dtype is not dtypes and (not isinstance(dtypes, (tuple, list)) or dtype not in dtypes):
            accepted = dtypes if isinstance(dtypes, (tuple, list)) else (dtypes,)
            raise TypeError(f"{name} must be {' or '.join(map(_plain, accepted))}, got {_plain(dtype)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    if last_contiguous and x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
        raise ValueError(
            f"{name} must have a contiguous last axis (stride 1), got strides {tuple(x.stride())} "
            f"for shape {list(x.shape)}"
        )


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _wrong_shape(name: str, shape: Mapping[str, int | None], got: Sequence[int]) -> None:
    axes = ", ".join(shape)
    sizes = ", ".join("any" if size is None else str(size) for size in shape.values())
    raise ValueError(f"{name} must be [{axes}]=[{sizes}], got {list(got)}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that isn't one of ``choices``.

    Raises:
        ValueError: naming the argument, what is accepted, and what came.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_number(name: str, x: Any) -> float:
    """A finite number as a float.

    Raises:
        TypeError: not a number (a tensor isn't one: reading it may synchronise).
        ValueError: infinite or NaN.
    """
    if not isinstance(x, Real):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    number = float(x)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {x!r}")
    return number


def check_count(name: str, x: Any, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises:
        TypeError: not a whole number.
        ValueError: too small.
    """
    try:
        number = index(x)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {x!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_boundaries(name: str, x: Any) -> None:
    """Refuse what can't be the boundaries of packed sequences, without reading values.

    Raises:
        TypeError: not a tensor.
        ValueError: not [N + 1] with N >= 1, or neither int32 nor int64.
    """
    if not isinstance(x, _tensor or _tensor_type()):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 1 or x.shape[0] < 2:
        raise ValueError(f"{name} must be [N + 1] with N >= 1, got {list(x.shape)}")
    if _plain(x.dtype) not in ("int32", "int64"):
        raise ValueError(f"{name} must be int32 or int64, got {_plain(x.dtype)}")


def saved_as(saved: Iterable[torch.Tensor | None]) -> list[Any]:
    """Shape, dtype and device of each: what a tensor that comes back from autograd shares with it."""
    return [x if x is None else (x.shape, x.dtype, x.device) for x in saved]


def check_saved(
    name: str, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a tensor that came back from autograd otherwise than it was saved.

    Saved tensors may pass through hooks (offloading, checkpoints), and a kernel trusts its extents.

    Raises:
        RuntimeError: another shape, dtype or device.
    """
    if x.shape != tuple(shape) or x.dtype != dtype or x.device != device:
        raise RuntimeError(
            f"the backward's saved {name} must be {dtype} {list(shape)} on {device}, "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )
