"""Where gradients lie: those of a projection's parts are parts of the projection's gradient.

A layer projects its input once and splits the channels of the result into q, k and v. The kernels read these
views as they are. Autograd's own way back from views is a copy: the backward of `split` or of a slice makes
one tensor of its parts' gradients. `split_projection` and the ops leave that copy out. An op asks `layout_of`
where its inputs' gradients are best written; where one function made them as views of one tensor, that is a
buffer laid out as this tensor is. That function's backward then finds its gradient whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from cake.core import tracing

__all__ = ["Layout", "layout_of", "split_projection"]

# A buffer may have room for channels that nobody here has, as many as for those that are here.
_MOST_ROOM = 2
# Kernels count the rows that they write in 32 bits.
_MOST_STRIDE = 2**26
# That a buffer has such room which is nobody's: an attribute of its tensor.
_ROOM = "_cake_room"


def split_projection(x: torch.Tensor, *shapes: int | Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The channels of a projection as views, whose gradients become that of the projection without a copy.

    ``q, k, v = split_projection(x, (H, 128), (H, 128), (HV, 128))`` are the views that `torch.split` and
    `unflatten` make. In the backward, gradients that lie in one buffer as the views do in `x` are returned as
    this buffer. An op of cake writes them that way when it gets the views as they are. Others are copied
    into one tensor, as autograd would.

    Args:
        x: `[..., C]`, any dtype and strides.
        shapes: of each part, what its channels become: a size or sizes, whose products add up to C.

    Returns:
        Views of `x`, `[..., *shape]`. Changing one in place raises where autograd records.

    Raises:
        TypeError: `x` is no tensor.
        ValueError: the parts don't add up to C, or `x` has no axis.

    A gradient may share memory with those of the parts, as that of a `view` does. In a compiled region it is
    `torch.split`, whose backward the compiler knows.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    parts = tuple((shape,) if isinstance(shape, int) else tuple(shape) for shape in shapes)
    channels = sum(math.prod(part) for part in parts)
    if not x.dim() or channels != x.shape[-1]:
        raise ValueError(f"shapes must add up to the last axis of x, got {list(parts)} for {list(x.shape)}")
    if not parts or not (x.requires_grad and torch.is_grad_enabled()) or tracing.traced():
        return _parts(x, parts)
    apply: Any = _Split.apply
    views: tuple[torch.Tensor, ...] = apply(x, parts)
    return views


def _parts(x: torch.Tensor, parts: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
    views = torch.split(x, [math.prod(part) for part in parts], -1)
    return tuple([torch.unflatten(view, -1, part) for view, part in zip(views, parts, strict=True)])


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like, ctx.parts = (x.shape, x.stride()), parts
        return _parts(x, parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None
        shape, strides = ctx.like
        if torch.is_grad_enabled():  # somebody differentiates this: as autograd's own split
            rows = [
                given[0].new_zeros((*shape[:-1], math.prod(part)))
                if grad is None
                else grad.flatten(len(shape) - 1)
                for grad, part in zip(grads, ctx.parts, strict=True)
            ]
            return torch.cat(rows, -1), None
        whole, there = _whole(grads, ctx.parts, shape, strides)
        if whole is None:
            whole, there = given[0].new_empty(shape), [False] * len(grads)
        views = [None] * len(grads) if all(there) else _parts(whole, ctx.parts)
        for grad, view, in_place in zip(grads, views, there, strict=True):
            if view is not None and grad is None:
                view.zero_()
            elif view is not None and grad is not None and not in_place:
                view.copy_(grad)
        return whole, None


def _whole(
    grads: Sequence[torch.Tensor | None],
    parts: Sequence[tuple[int, ...]],
    shape: torch.Size,
    strides: tuple[int, ...],
) -> tuple[torch.Tensor | None, list[bool]]:
    """The tensor whose parts the gradients are, and which of them lie in it; None if there is none."""
    lead, first, column = len(shape) - 1, 0, 0
    base: torch.Tensor | None = None
    there = []
    for grad, part in zip(grads, parts, strict=True):
        fits = False
        if grad is not None and grad._base is not None and _follows(grad, lead, strides):
            place = int(grad.storage_offset()) - column
            if base is None:
                base, first = grad._base, place
            fits = grad._base is base and place == first
        there.append(fits)
        column += math.prod(part)
    if base is None or strides[-1] != 1 or not base.is_contiguous():
        return None, there
    end = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if first < base.storage_offset() or end > base.storage_offset() + base.numel():
        return None, there
    # Memory between the parts is written only where it is known to be nobody's, and once.
    if not all(there) and not base.__dict__.pop(_ROOM, False):
        return None, there
    return base.as_strided(shape, strides, first), there


def _follows(grad: torch.Tensor, lead: int, strides: tuple[int, ...]) -> bool:
    """Whether its rows are contiguous and lie as those of a tensor with such strides."""
    rows = all(
        size == 1 or mine == other
        for size, mine, other in zip(grad.shape[:lead], grad.stride(), strides, strict=False)
    )
    step = 1
    for size, stride in zip(reversed(grad.shape[lead:]), reversed(grad.stride()[lead:]), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return rows


@dataclass(frozen=True)
class Layout:
    """Memory for the gradients of a call's inputs.

    buffers: elements and dtype of each, and whether it has room that is nobody's.
    places: of each input its buffer, shape, strides and first element.
    """

    buffers: tuple[tuple[int, torch.dtype, bool], ...]
    places: tuple[tuple[int, torch.Size, tuple[int, ...], int], ...]

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Uninitialised memory, as tensors shaped like the inputs."""
        made = []
        for elements, dtype, room in self.buffers:
            buffer = torch.empty(elements, dtype=dtype, device=device)
            if room:
                setattr(buffer, _ROOM, True)
            made.append(buffer)
        return [made[i].as_strided(shape, strides, first) for i, shape, strides, first in self.places]

    def place(self, *gradients: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Copies of gradients in such memory, for a backend that writes them elsewhere."""
        given = [x for x in gradients if x is not None]
        if not given:
            return gradients
        made = self.empty(given[0].device)
        for x, gradient in zip(made, gradients, strict=True):
            if gradient is not None:
                x.copy_(gradient)
        return [None if x is None else placed for x, placed in zip(gradients, made, strict=True)]


def layout_of(*inputs: torch.Tensor) -> Layout | None:
    """Where gradients of inputs are best written; None if contiguously, each in memory of its own.

    - Views that one `torch.autograd.Function` made of one tensor (as `split_projection` does), with the same
      strides over their first two axes and rows that don't overlap, get one buffer with these strides and
      the same distances between them, as long as they fill half of it.
    - A tensor that fills its memory in another order of its axes gets that order.

    Everything else is copied by autograd's own nodes anyway, faster from contiguous tensors: parts of
    `torch.split`, or a leaf with room between its rows.

    Args:
        inputs: `[B, T, ...]`.
    """
    if all(x.is_contiguous() for x in inputs):
        return None
    nodes: list[Any] = []
    key = []
    for x in inputs:
        node: Any = None if x.is_contiguous() else x.grad_fn
        group = -1
        if isinstance(node, BackwardCFunction):
            found = [i for i, other in enumerate(nodes) if other is node]
            group = found[0] if found else len(nodes)
            if not found:
                nodes.append(node)
        key.append((x.shape, x.stride(), x.dtype, x.storage_offset(), group))
    return _layout(tuple(key))


@lru_cache(maxsize=256)
def _layout(inputs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, int, int], ...]) -> Layout | None:
    buffers: list[tuple[int, torch.dtype, bool]] = []
    places: dict[int, tuple[int, torch.Size, tuple[int, ...], int]] = {}
    groups: dict[Any, list[int]] = {}
    for i, (_, _, dtype, _, group) in enumerate(inputs):
        if group >= 0:
            groups.setdefault((group, dtype), []).append(i)
    for (_, dtype), members in groups.items():
        room = _shared([inputs[i] for i in members])
        if room is not None:
            elements, firsts, full = room
            for i, first in zip(members, firsts, strict=True):
                places[i] = (len(buffers), *inputs[i][:2], first)
            buffers.append((elements, dtype, not full))
    kept = bool(places)
    for i, (shape, strides, dtype, _, _) in enumerate(inputs):
        if i in places:
            continue
        own = _fills(shape, strides)
        kept = kept or own
        places[i] = (len(buffers), shape, strides if own else _contiguous(shape), 0)
        buffers.append((math.prod(shape), dtype, False))
    return Layout(tuple(buffers), tuple(places[i] for i in range(len(inputs)))) if kept else None


def _shared(views: Sequence[tuple[Any, ...]]) -> tuple[int, list[int], bool] | None:
    """Elements of a buffer for views of one tensor, where each begins, and whether they fill it."""
    lead, steps = views[0][0][:2], views[0][1][:2]
    outer = sorted((step, size) for step, size in zip(steps, lead, strict=True) if size > 1)
    if not outer or outer[0][0] <= 0 or outer[0][0] >= _MOST_STRIDE:
        return None
    row = outer[0][0]
    if len(outer) > 1 and outer[1][0] < outer[0][0] * outer[0][1]:
        return None
    least = min(first for _, _, _, first, _ in views)
    runs = []
    for shape, strides, _, first, _ in views:
        if shape[:2] != lead or any(
            size > 1 and a != b for size, a, b in zip(lead, strides, steps, strict=False)
        ):
            return None
        starts = [first - least]
        *heads, (size, step) = zip(shape[2:], strides[2:], strict=True)
        if step != 1:
            heads.append((size, step))
            size = 1
        for count, stride in heads:
            starts = [start + i * stride for start in starts for i in range(count)]
        runs += [(start, start + size) for start in starts]
    runs.sort()
    if any(end > start for (_, end), (start, _) in pairwise(runs)):
        return None
    # Where the row begins if the tensor begins where its memory does; or else no further back than alignment
    # asks for.
    before = next((x for x in (least % row, least % 8) if x + runs[-1][1] <= row), None)
    if before is None:
        return None
    elements, used = outer[-1][0] * outer[-1][1], sum(math.prod(shape) for shape, *_ in views)
    if elements > _MOST_ROOM * used:
        return None
    return elements, [before + first - least for _, _, _, first, _ in views], elements == used


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of rows fills its memory, in an order of its axes that isn't the usual one."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return strides[-1] == 1 or len(shape) == 3


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
