"""The passes of an arm as what is prepared and what is measured, and the bytes that its tape holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cake.core.bench._model import Call, Inputs, Pass

Outputs = Sequence["torch.Tensor | None"]


def plan(call: Call, inputs: Inputs, which: Pass) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """``(prepare, run)`` of a pass: ``run(prepare())`` is the pass, and ``run`` the part that is measured."""

    def nothing() -> None:
        return None

    def inference(_: None) -> Outputs:
        with torch.no_grad():
            return call(inputs)

    def forward(_: None = None) -> Outputs:
        return call(inputs)

    def backward(outputs: Outputs) -> Sequence[torch.Tensor | None]:
        return gradients(outputs, inputs)

    def both(_: None) -> Sequence[torch.Tensor | None]:
        return gradients(call(inputs), inputs)

    if which == "fwd":
        return nothing, inference
    if which == "fwd_train":
        return nothing, forward
    if which == "bwd":
        return forward, backward
    return nothing, both


def gradients(outputs: Outputs, inputs: Inputs) -> Sequence[torch.Tensor | None]:
    """Gradients of the leaves of the inputs, in their order; the graph is freed."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, inputs.output_gradients, strict=True)
        if output is not None and gradient is not None
    ]
    return torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs.leaves.values()),
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )


@torch.no_grad()
def outputs(call: Call, inputs: Inputs) -> dict[str, torch.Tensor]:
    """``output0``, ... of a call that has no backward."""
    return {f"output{i}": x for i, x in enumerate(call(inputs)) if x is not None}


def results(call: Call, inputs: Inputs) -> tuple[dict[str, torch.Tensor], int]:
    """One forward and backward, and what the forward kept for the backward.

    Returns:
        Outputs and gradients by name (``output0``, ..., ``d<leaf>``, ...; those that are None are left out),
        and the bytes kept beyond the inputs, each piece of memory counted once.
    """
    given = {x.untyped_storage().data_ptr() for x in inputs.tensors.values()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        # Not x itself: an output that its own node keeps would be a cycle.
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = call(inputs)
    grads = gradients(outputs, inputs)
    named = {f"output{i}": x.detach() for i, x in enumerate(outputs) if x is not None}
    named |= {f"d{name}": x for name, x in zip(inputs.leaves, grads, strict=True) if x is not None}
    return named, sum(kept.values())
