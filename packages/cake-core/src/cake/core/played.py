"""Calls that kernels run: nodes of autograd that play what the stages of an op recorded.

Both ops share the node. An op says in an `Op` what its forward and its backward do; that runs over stand-ins
when a call is first seen, and every call like it plays the recording (`cake.core.recording`). What a forward
leaves for its backward is one tensor, the tape, besides the inputs that it needs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch

from cake.core import loader
from cake.core.calls import differentiated_once, refuse_tangents
from cake.core.checks import check_saved
from cake.core.gradients import layout_of
from cake.core.launch import loadable
from cake.core.recording import Extents, Otherwise, Recording, StandIn, know, known, record
from cake.core.segments import Segments
from cake.core.sequences import Sequences

__all__ = ["Op", "run"]


class Call(Protocol):
    """What a call is besides its tensors.

    recordings: of all calls like this one.
    differentiable: whether a backward can follow.
    tape: which tape a forward leaves; "inputs" for none.
    """

    @property
    def recordings(self) -> dict[Any, Recording]: ...
    @property
    def seqs(self) -> Sequences: ...
    @property
    def segments(self) -> Segments | None: ...
    @property
    def differentiable(self) -> bool: ...
    @property
    def tape(self) -> str: ...


@dataclass(frozen=True)
class Op:
    """How an op's calls run. Everything but `kept` is asked when a call is first seen.

    name: the op's.
    inputs: names of the inputs; q, k and v are the first three.
    rows: of those whose rows kernels load 16 bytes at a time.
    laid: of those whose gradients a layout has places for (`cake.core.gradients`), in its order.
    stages: the backend's module; its `library` plays recordings, its `tables` are those of boundaries.
    kept: by tape, for each input whether a backward needs it again. It does the first three.
    forward: (call, inputs, tape) -> (output, final state), and the pieces of the tape.
    backward: (call, inputs, do, dht, pieces or None, wanted, into) -> a gradient for each input, or None.
        `into`: memory for those that are laid, in that order, or None. An input that wasn't kept has extents
        alone.
    """

    name: str
    inputs: tuple[str, ...]
    rows: tuple[str, ...]
    laid: tuple[str, ...]
    stages: Callable[[], ModuleType]
    kept: Callable[[str], tuple[bool, ...]]
    forward: Callable[..., tuple[Sequence[Any], Sequence[Any]]]
    backward: Callable[..., Sequence[Any]]
    #: Of `kept`, by tape.
    _places: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def places(self, tape: str) -> tuple[int, ...]:
        """Which of the inputs are kept."""
        found = self._places.get(tape)
        if found is None:
            found = self._places[tape] = tuple(i for i, keep in enumerate(self.kept(tape)) if keep)
        return found


def run(
    op: Op, call: Call, inputs: tuple[torch.Tensor | None, ...], boundaries: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state, on the graph if a backward can follow.

    Args:
        boundaries: of the call, where they are on the device alone.

    Raises:
        Otherwise: of `recording`.
        NotImplementedError: an input with a tangent of forward-mode differentiation.
    """
    refuse_tangents(op.inputs, inputs)  # kernels know nothing of them: the output would be a constant
    if call.differentiable:
        apply = _Node.apply if torch._C._are_functorch_transforms_active() else _apply
        o, final_state = apply(op, call, boundaries, *inputs)
    else:
        (o, final_state), _, _ = _forward(op, call, inputs, boundaries, "inputs")
    return o, final_state


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: Op, call: Call, boundaries: torch.Tensor | None, *inputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        (o, final_state), tape, plan = _forward(op, call, inputs, boundaries, call.tape)
        layout = None
        for x in inputs:
            if x is not None and not x.is_contiguous():
                laid: list[Any] = [inputs[op.inputs.index(name)] for name in op.laid]
                layout = layout_of(*laid)
                break
        ctx.made = op, call, layout
        # Boundaries on the device are saved too: refilled in place before the backward, they raise there.
        ctx.save_for_backward(*[inputs[i] for i in op.places(call.tape)], boundaries, plan, tape)
        return o, final_state

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        op, call, layout = ctx.made
        if do is None and dht is None:
            return (None,) * (3 + len(op.inputs))
        saved = ctx.saved_tensors  # asked once: a checkpoint unpacks at every question
        wanted = ctx.needs_input_grad[3:]
        v = saved[2]
        if do is None:
            do = v.new_zeros(v.shape)
        elif not do.is_contiguous():
            do = loadable(do)
        if saved[-1] is None and saved[-2] is None:  # without a tape the tables are made again
            saved = (*saved[:-2], _host_tables(op, call, v.device), None)
        into = () if layout is None else tuple(layout.empty(v.device))
        key = wanted, dht is None, layout is None
        recording = call.recordings.get(key)
        if recording is None or recording.epoch != loader.epoch:
            recording = call.recordings[key] = _backward(op, call, into, saved, do, dht, wanted)
        try:
            grads, _ = recording.play((*into, *saved, do, dht))
        except Otherwise:
            copy = loadable(do)
            if copy is do:
                raise
            grads, _ = recording.play((*into, *saved, copy, dht))
        if into:
            at = dict(zip(op.laid, into, strict=True))
            named = zip(op.inputs, wanted, grads, strict=True)
            grads = [at.get(name, grad) if need else None for name, need, grad in named]
        for i, dtype in recording.casts:
            grads[i] = grads[i].to(dtype)
        return (None, None, None, *grads)


# What `_Node.apply` calls, at two thirds of its time: no argument has to be looked through where no transform
# of functorch is active.
_apply: Any = super(torch.autograd.Function, _Node).apply


def _host_tables(op: Op, call: Call, device: torch.device) -> torch.Tensor | None:
    """Tables of boundaries that the host knows, which calls share; others are a part of the recording."""
    walked = call.segments or call.seqs
    if walked.boundaries is None:
        return None
    tables: torch.Tensor = op.stages().tables(walked, device)
    return tables


def _forward(
    op: Op, call: Call, inputs: tuple[Any, ...], boundaries: torch.Tensor | None, tape: str
) -> tuple[list[Any], torch.Tensor | None, torch.Tensor | None]:
    """(output, final state), the tape, and tables that the host made; these two None without a tape."""
    walked = call.segments or call.seqs
    plan = None if walked.boundaries is None else _host_tables(op, call, inputs[2].device)
    recording = call.recordings.get(tape)
    if recording is None or recording.epoch != loader.epoch:
        recording = call.recordings[tape] = _recorded_forward(op, call, inputs, boundaries, plan, tape)
    results, made = recording.play((*inputs, boundaries, plan))
    return results, made, None if made is None else plan


def _recorded_forward(
    op: Op,
    call: Call,
    inputs: tuple[Any, ...],
    boundaries: torch.Tensor | None,
    plan: torch.Tensor | None,
    tape: str,
) -> Recording:
    def stages(*given: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        results, pieces = op.forward(call, given[: len(inputs)], tape)
        tables = known("plan") if plan is None else None
        return results, (tables, *pieces) if tape != "inputs" else ()

    given = dict(zip((*op.inputs, "cu_seqlens", "plan"), (*inputs, boundaries, plan), strict=True))
    return record(op.stages().library(), op.name, "forward", inputs[2].device, given, stages, rows=op.rows)


def _backward(
    op: Op,
    call: Call,
    into: tuple[torch.Tensor, ...],
    saved: tuple[Any, ...],
    do: torch.Tensor,
    dht: torch.Tensor | None,
    wanted: tuple[bool, ...],
) -> Recording:
    first, device, n = call.recordings[call.tape], do.device, len(op.inputs)
    kept = op.places(call.tape)
    # What a recording is made of is what it checks from then on.
    made = [*[first.given[i] for i in kept], *first.given[n:]]
    made.append(None if first.tape_bytes is None else Extents((first.tape_bytes,), torch.uint8))
    of_saved = (*[op.inputs[i] for i in kept], "cu_seqlens", "plan", "tape")
    for name, x, extents in zip(of_saved, saved, made, strict=True):
        if x is not None and extents is not None:
            check_saved(name, x, *extents, first.device)

    def stages(*given: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        results, given = given[: len(into)], given[len(into) :]
        inputs = [None if extents is None else StandIn(*extents, device) for extents in first.given[:n]]
        for i, x in zip(kept, given, strict=False):
            inputs[i] = x
        _, plan, tape, do, dht = given[len(kept) :]
        pieces = None
        if tape is not None:
            tables, *pieces = tape
            if plan is None:
                know("plan", tables)
        grads = op.backward(call, inputs, do, dht, pieces, wanted, results or None)
        laid = [bool(into) and name in op.laid for name in op.inputs]
        return [
            grad if need and not there else None
            for grad, need, there in zip(grads, wanted, laid, strict=True)
        ], ()

    names = (*[f"d{name}" for name in op.laid[: len(into)]], *of_saved, "do", "dht")
    return record(
        op.stages().library(),
        op.name,
        "backward",
        device,
        dict(zip(names, (*into, *saved, do, dht), strict=True)),
        stages,
        rows=("do",),
        tape_of=first if call.tape != "inputs" else None,
        early=True,
        dtypes=[None if extents is None else extents.dtype for extents in first.given[:n]],
        whose="the backward's saved ",
    )
