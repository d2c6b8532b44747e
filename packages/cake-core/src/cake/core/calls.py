"""What the metadata of a call's arguments decides, decided once.

Checks, the plan of segments and the route of a call depend on shapes, strides, dtypes, devices and options,
and a training step makes the same few calls again and again. An op keys what it decided by `layouts` and its
options, and finds it again in a `Memo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "Memo", "layouts"]

T = TypeVar("T")

#: Shape, strides, dtype and device of a tensor.
Layout = tuple["torch.Size", tuple[int, ...], "torch.dtype", "torch.device"]


def layouts(*tensors: torch.Tensor | None) -> tuple[Layout | None, ...] | None:
    """What checks of metadata see: equal layouts pass or fail them alike.

    None in place of a tensor that isn't given; None for all if one of them is no tensor.
    """
    try:
        return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])
    except (AttributeError, TypeError):
        return None


class Memo(Generic[T]):
    """A bounded dictionary that forgets everything when it is full. Safe for threads.

    Args:
        most: entries that it keeps.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._made: dict[Any, T] = {}

    def get(self, key: Any) -> T | None:
        """What was kept under `key`; None if nothing was, or where it can't be a key."""
        try:
            return self._made.get(key)
        except TypeError:
            return None

    def keep(self, key: Any, value: T) -> T:
        """Keeps `value` under `key`, and returns it."""
        try:
            if len(self._made) >= self._most:
                self._made.clear()
            self._made[key] = value
        except TypeError:
            pass  # it can't be a key
        return value
