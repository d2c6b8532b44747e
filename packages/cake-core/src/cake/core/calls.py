"""What the metadata of a call's arguments decides, decided once.

Checks, the plan of segments and the route of a call depend on shapes, strides, dtypes, devices and options,
and a training step makes the same few calls again and again. An op keys what it decided by `key_of`, and
finds it again in a `Memo`; where boundaries are on a device alone, `Planned.at` puts those of a call in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

from cake.core import config
from cake.core.segments import Segments
from cake.core.sequences import Sequences, known_boundaries

__all__ = [
    "Layout",
    "Memo",
    "Planned",
    "differentiated_once",
    "key_of",
    "layouts",
    "near_key_of",
    "refuse_tangents",
]

T = TypeVar("T")
P = TypeVar("P", bound="Planned")

#: Class, shape, strides, dtype and device of a tensor, and whether it requires a gradient.
Layout = tuple[type, torch.Size, tuple[int, ...], torch.dtype, torch.device, bool]
_INDICES = (torch.int32, torch.int64)


def layouts(tensors: Iterable[torch.Tensor | None]) -> tuple[Layout | None, ...] | None:
    """What checks of metadata see: equal layouts pass or fail them alike.

    None in place of a tensor that isn't given; None for all if one of them is no tensor.
    """
    try:
        return tuple(
            [
                x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
                for x in tensors
            ]
        )
    except (AttributeError, TypeError):
        return None


def key_of(
    tensors: Sequence[torch.Tensor | None],
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
    settings: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """All that decides a call, its configuration and the mode of autograd included.

    None where one of `tensors` is no tensor.

    Raises:
        TypeError, ValueError: boundaries on the host that can't be read, as `sequences.host_values`.
    """
    layout = layouts(tensors if cu_seqlens is None else (*tensors, cu_seqlens))
    if layout is None:
        return None
    return (
        layout,
        _known(cu_seqlens, cu_seqlens_cpu),
        settings,
        config.stamp,
        torch.is_grad_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def near_key_of(
    tensors: Sequence[Any],
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
    settings: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """What decides a call but for what its recording sees, at a quarter of the time of `key_of`.

    A call that is found by it may be another one, whose recording refuses these tensors (`Otherwise`). None
    where a recording doesn't see all of them.

    Args:
        tensors: q, k, v and more, every one of them an argument of the recording, or None. What the key holds
            of their metadata keeps calls of several shapes and devices from taking turns.
        cu_seqlens, cu_seqlens_cpu, settings: as of `key_of`.
    """
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        return None
    try:
        return (
            tensors[0].device,
            tensors[0].shape,
            tensors[2].shape,
            cu_seqlens is None,
            # On the device nobody knows them.
            None
            if cu_seqlens_cpu is None and (cu_seqlens is None or cu_seqlens.is_cuda)
            else _known(cu_seqlens, cu_seqlens_cpu),
            settings,
            config.stamp,
            torch.is_grad_enabled(),
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
            *[None if x is None else x.requires_grad for x in tensors],
            *map(type, tensors),  # a recording can't tell a distributed tensor from a plain one
        )
    except AttributeError:
        return None  # one of them is no tensor


def _known(
    cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | Sequence[int] | None
) -> tuple[int, ...] | None:
    given = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if given is None:
        return None
    if type(given) is torch.Tensor and given.is_cpu and given.dtype in _INDICES and given.dim() == 1:
        return tuple(given.tolist())  # what the line below gives, at a third of its time
    return known_boundaries(cu_seqlens, cu_seqlens_cpu)


def refuse_tangents(names: Sequence[str], inputs: Sequence[torch.Tensor | None]) -> None:
    """Refuse what nothing would be made of.

    Raises:
        NotImplementedError: an input with a tangent of forward-mode differentiation.
    """
    if forward_ad._current_level < 0:
        return
    unpack: Any = forward_ad.unpack_dual
    for name, x in zip(names, inputs, strict=True):
        if x is not None and unpack(x).tangent is not None:
            raise NotImplementedError(f"forward-mode gradients aren't served, got a dual tensor {name}")


def differentiated_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose results have no gradients: whoever asks for one gets an error.

    torch's own `once_differentiable` takes results for constants where no gradient that comes in has a graph,
    as in the backward of a sum, though the saved inputs may have one: a penalty on gradients would have
    silently wrong gradients. This one costs nothing where nobody asks for gradients of gradients.
    """

    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(ctx, *grads)
        with torch.no_grad():
            results = fn(ctx, *grads)
        given = [x for x in results if x is not None]
        apply: Any = _Final.apply
        left = iter(apply(*[x.detach().requires_grad_() for x in given]) if given else ())
        return tuple(x if x is None else next(left) for x in results)

    return backward


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("gradients of gradients aren't served: cake's ops are once_differentiable")


class Planned:
    """A frozen record of a call: its `seqs`, and `segments`, which are walked in their place if it is cut."""

    seqs: Sequences
    segments: Segments | None

    def at(self: P, cu_seqlens: torch.Tensor | None) -> P:
        """The same call; where its boundaries are on the device alone, in this tensor."""
        if self.seqs.boundaries is not None:
            return self
        seqs, cut = self.seqs.at(cu_seqlens), self.segments
        if cut is not None and cut.boundaries is None:
            cut = cut.at(cu_seqlens)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, seqs=seqs, segments=cut)
        return made


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
