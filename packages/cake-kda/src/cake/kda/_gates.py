"""Gate and beta activations and their gradients, in fp32.

A log decay below -88 counts as -88: the decay e^-88 is the least that fp32 holds, and beyond it the gradient
of the gate's parameters is 0. No argument that is a number gives an infinity or a NaN, forward or backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid, softplus

from cake.core.calls import differentiated_once
from cake.kda._stages import Gate

MIN_LOG_DECAY = -88.0
# Of a bounded gate: with a rate of e^30 its sigmoid is a step for every x that isn't 0 to 12 digits.
MAX_LOG_RATE = 30.0
# A sigmoid is 0 or 1 to fp32, and its slope 0, long before.
SATURATED = 1e4
# log(softplus(x)) = x to fp32 below it.
_LINEAR_BELOW = -17.0


def log_decay(raw: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """Log decay, natural log, at least -88.

    Args:
        raw: [count, HV, n, K]; the log decay itself where `gate` is None.

    Returns:
        fp32, shaped like `raw`.
    """
    if gate is None:
        return raw.float().clamp_min(MIN_LOG_DECAY)
    return _activate(_biased(raw, gate), gate).clamp_min(MIN_LOG_DECAY)


def log_decay_backward(raw: torch.Tensor, dg: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the raw gate and of A_log, each value's share of the latter, from the log decay's `dg`.

    Args and results: fp32 [count, HV, n, K].
    """
    x = _biased(raw, gate)
    g = _activate(x, gate)
    dg = torch.where(g > MIN_LOG_DECAY, dg, 0.0)
    if gate.lower_bound is None:
        # dg/dA_log = g and dg/dx = g sigmoid(x) / softplus(x). In log space the quotient is 1 at the far
        # left, where both underflow. A gate at -infinity is masked above: 0 must not meet it.
        weighted = torch.where(g > MIN_LOG_DECAY, g, 0.0) * dg
        return weighted * (logsigmoid(x) - _log_softplus(x)).exp(), weighted
    rate = _rate(x, gate)
    u = (rate * x).clamp(-SATURATED, SATURATED)
    # sigmoid(-u) rather than 1 - sigmoid(u), which loses its digits on the right.
    slope = gate.lower_bound * u.sigmoid() * (-u).sigmoid() * dg
    return slope * rate, slope * u


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


def _biased(raw: torch.Tensor, gate: Gate) -> torch.Tensor:
    x = raw.float()
    return x if gate.bias is None else x + gate.bias.float()[:, None, :]


def _rate(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    if gate.a_log is None:
        return x.new_ones(())
    return gate.a_log.float().clamp_max(MAX_LOG_RATE).exp()[:, None, None]


def _activate(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    if gate.lower_bound is not None:
        return gate.lower_bound * (_rate(x, gate) * x).sigmoid()
    assert gate.a_log is not None
    # A product of exponentials in log space: exp(A_log) may overflow where softplus(x) underflows.
    return -(gate.a_log.float()[:, None, None] + _log_softplus(x)).exp()


def _log_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < _LINEAR_BELOW, x, softplus(x.clamp_min(_LINEAR_BELOW)).log())
