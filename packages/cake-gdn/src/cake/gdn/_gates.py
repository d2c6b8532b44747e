"""Gate and beta activations, forward and backward, on the small [B, T, HV] tensors of both backends.

Everything is computed in fp32. A log decay below -88 counts as -88: the decay e^-88 is the least that fp32
holds, and beyond it the gradient is 0. Sums over tokens have a fixed order, whatever the device or its load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid, softplus

from cake.core.calls import differentiated_once

MIN_LOG_DECAY = -88.0
# log(softplus(x)) = x to fp32 below it.
_LINEAR_BELOW = -17.0
# Values that one step of a sum adds up: few enough that a GPU never splits them by its number of SMs.
_FAN_IN = 128


def gate(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """Log decay ``g = -exp(A_log) softplus(raw + dt_bias)``, at least -88.

    Args:
        raw: [B, T, HV], any floating dtype.
        a_log, dt_bias: [HV], any floating dtype; dt_bias None counts as 0.

    Returns:
        g, fp32 [B, T, HV]. No argument that is a number gives an infinity or a NaN, forward or backward.
    """
    apply: Any = _Gate.apply
    g: torch.Tensor = apply(raw, a_log, dt_bias)
    return g


def gate_forward(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """`gate` without its gradient."""
    return _log_decay(_biased(raw, dt_bias), a_log)


def gate_backward(
    dg: torch.Tensor, raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of raw, A_log and dt_bias from that of the log decay, in their dtypes."""
    x = _biased(raw, dt_bias)
    g = _log_decay(x, a_log)
    # dg/dA_log = g and dg/dx = g sigmoid(x) / softplus(x). In log space the quotient is 1 at the far
    # left, where both underflow.
    weighted = torch.where(g > MIN_LOG_DECAY, g * dg, 0.0)
    dx = weighted * (logsigmoid(x) - _log_softplus(x)).exp()
    d_bias = None if dt_bias is None else _token_sum(dx).to(dt_bias.dtype)
    return dx.to(raw.dtype), _token_sum(weighted).to(a_log.dtype), d_bias


def beta_sigmoid(logits: torch.Tensor, allow_neg_eigval: bool) -> torch.Tensor:
    """``sigmoid(logits)``, twice that with `allow_neg_eigval`: fp32 in the shape of the logits."""
    apply: Any = _BetaSigmoid.apply
    beta: torch.Tensor = apply(logits, beta_scale(allow_neg_eigval))
    return beta


def beta_scale(allow_neg_eigval: bool) -> float:
    """The factor of the sigmoid."""
    return 2.0 if allow_neg_eigval else 1.0


def beta_forward(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """`beta_sigmoid` without its gradient."""
    return scale * logits.float().sigmoid()


def beta_backward(d_beta: torch.Tensor, logits: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the logits, in their dtype."""
    x = logits.float()
    # sigmoid(-x) rather than 1 - sigmoid(x), which loses its digits on the right.
    return (d_beta * (scale * x.sigmoid() * (-x).sigmoid())).to(logits.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(raw, a_log, dt_bias)
        return gate_forward(raw, a_log, dt_bias)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, dg: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dg is None:
            return None, None, None
        return gate_backward(dg, *ctx.saved_tensors)


class _BetaSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        ctx.scale = scale
        return beta_forward(logits, scale)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, d_beta: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if d_beta is None:
            return None, None
        (logits,) = ctx.saved_tensors
        return beta_backward(d_beta, logits, ctx.scale), None


def _biased(raw: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    x = raw.float()
    return x if dt_bias is None else x + dt_bias.float()


def _log_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < _LINEAR_BELOW, x, softplus(x.clamp_min(_LINEAR_BELOW)).log())


def _log_decay(x: torch.Tensor, a_log: torch.Tensor) -> torch.Tensor:
    # A product of exponentials in log space: exp(A_log) may overflow where softplus(x) underflows.
    return (-(a_log.float() + _log_softplus(x)).exp()).clamp_min(MIN_LOG_DECAY)


def _token_sum(x: torch.Tensor) -> torch.Tensor:
    """[B, T, HV] -> [HV], in a fixed tree of sums."""
    x = x.flatten(0, 1)
    while x.shape[0] > 1:
        steps = -(-x.shape[0] // _FAN_IN)
        x = torch.nn.functional.pad(x, (0, 0, 0, steps * _FAN_IN - x.shape[0]))
        x = x.view(steps, _FAN_IN, -1).sum(1)
    return x.sum(0)
