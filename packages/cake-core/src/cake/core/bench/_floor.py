"""What the host needs for a call that computes nothing: the floor of every arm's host time on a machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from cake.core.bench._meter import Meter

#: Tensors that a call takes, and gradients that it gives: q, k, v, g and beta.
INPUTS = 5


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gradient,) * len(ctx.saved_tensors)


def host_floor(meter: Meter, device: torch.device, samples: int = 15) -> dict[str, float]:
    """Median host time in us of passes of an autograd node that saves its inputs and launches nothing.

    Each sample begins on an idle device with a flushed L2, one behind another. Without a device, nothing.
    """
    inputs = [torch.zeros(1, device=device, requires_grad=True) for _ in range(INPUTS)]
    gradient = torch.zeros(1, device=device)

    apply: Any = _Nothing.apply

    def forward(_: Any = None) -> Any:
        return apply(*inputs)

    def backward(out: Any) -> Any:
        return torch.autograd.grad(out, inputs, gradient)

    def nothing() -> None:
        """What a forward is prepared by."""

    passes: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "fwd_train": (nothing, forward),
        "bwd": (forward, backward),
        "fwd+bwd": (nothing, lambda _: backward(forward())),
    }
    found = {}
    for name, (prepare, run) in passes.items():
        hosts = [meter.sample(prepare, run)[1] for _ in range(3 + samples)][3:]
        known = [host for host in hosts if host is not None]
        if known:
            found[name] = round(statistics.median(known), 1)
    return found
