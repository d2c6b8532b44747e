"""The truth that ops are tested against: the gated delta rule token by token in FP64, and its adjoint.

The decay is one number per head (GDN) or one per key channel (KDA). Shares no code and no algebra with the
chunked backends of ops; the adjoint is written out by hand. Tokens are walked one by one, vectorised over
heads and over the sequences of a pack; it runs on a CPU and on a GPU. One token of one head, with decay
a = exp(g), state S [K, V] and the L2-normalised q^ = q / sqrt(sum q^2 + 1e-6) and k^ alike:

    S' = diag(a) S      r = v - S'^T k^      d = beta r      S = S' + k^ d^T      o = scale S^T q^
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Gradients", "backward", "forward"]

NORM_EPS = 1e-6
# Tokens between two states that the adjoint keeps; it walks again from one to the next.
SPAN = 64


@dataclass(frozen=True)
class Gradients:
    """Gradients in FP64, each in the shape of its input; dh0 [N, HV, K, V] also where no state was given."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dh0: torch.Tensor


@torch.no_grad()
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    boundaries: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state.

    Args:
        q, k: [B, T, H, K], any real dtype.
        v: [B, T, HV, V]; v head h reads q/k head h // (HV / H).
        g: log decay, natural log, [B, T, HV], or [B, T, HV, K] for one per key channel.
        beta: [B, T, HV].
        scale: K^-0.5 by default.
        initial_state: [N, HV, K, V]; zero by default.
        use_qk_l2norm: normalise q and k.
        boundaries: of packed sequences (B = 1), N + 1 values; by default every row is a sequence.

    Returns:
        o [B, T, HV, V] and the final state [N, HV, K, V], in FP64.
    """
    walk = _Walk(q, k, v, g, beta, scale, initial_state, use_qk_l2norm, boundaries)
    o = torch.empty_like(walk.v)
    state = walk.initial.clone()
    for step in walk.steps():
        state[: step.count] = walk.advance(state[: step.count], step)[0]
        o[step.tokens] = walk.scale * _read(state[: step.count], walk.q[step.tokens])
    return o.view(v.shape), walk.in_order(state)


@torch.no_grad()
def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor | None,
    dht: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    boundaries: Sequence[int] | None = None,
) -> Gradients:
    """Gradients of ``(o * do).sum() + (final_state * dht).sum()``; None counts as zero.

    Arguments as in `forward`; do [B, T, HV, V], dht [N, HV, K, V]. With R the adjoint of a token's state:

        R += scale q^ do^T      dq^ = scale S do      dd = R^T k^      dr = beta dd = dv      dbeta = dd . r
        dk^ = R d - S' dr       R' = R - k^ dr^T      dg = <S', R'>    R before the token = diag(a) R'

    The product <S', R'> runs over V alone where the decay is one per channel.
    """
    walk = _Walk(q, k, v, g, beta, scale, initial_state, use_qk_l2norm, boundaries)
    grad = torch.zeros_like(walk.v) if do is None else do.double().reshape(walk.v.shape)
    adjoint = torch.zeros_like(walk.initial) if dht is None else walk.by_length(dht.double()).clone()
    dq, dk = torch.empty_like(walk.q), torch.empty_like(walk.k)
    dv, dg, dbeta = torch.empty_like(walk.v), torch.empty_like(walk.g), torch.empty_like(walk.beta)

    steps = list(walk.steps())
    kept = []
    state = walk.initial.clone()
    for i, step in enumerate(steps):
        if i % SPAN == 0:
            kept.append(state.clone())
        state[: step.count] = walk.advance(state[: step.count], step)[0]
    for first in range((len(steps) - 1) // SPAN * SPAN, -1, -SPAN) if steps else ():
        span = steps[first : first + SPAN]
        state = kept.pop()
        trail = []
        for step in span:
            new, decayed, residual = walk.advance(state[: step.count], step)
            state[: step.count] = new
            trail.append((new, decayed, residual))
        for step, (new, decayed, residual) in zip(reversed(span), reversed(trail), strict=True):
            at, k_hat, gate = step.tokens, walk.k[step.tokens], walk.beta[step.tokens]
            now = adjoint[: step.count]
            now += walk.scale * _outer(walk.q[at], grad[at])
            dq[at] = walk.scale * _write(new, grad[at])
            d_delta = _read(now, k_hat)
            d_residual = gate[..., None] * d_delta
            dv[at] = d_residual
            dbeta[at] = (d_delta * residual).sum(-1)
            dk[at] = _write(now, gate[..., None] * residual) - _write(decayed, d_residual)
            now -= _outer(k_hat, d_residual)
            dg[at] = (decayed * now).sum(-1) if walk.per_channel else (decayed * now).sum((-2, -1))
            now *= walk.decay(at)

    return Gradients(
        dq=_norm_backward(q, _group_sum(dq, q), use_qk_l2norm),
        dk=_norm_backward(k, _group_sum(dk, k), use_qk_l2norm),
        dv=dv.view(v.shape),
        dg=dg.view(g.shape),
        dbeta=dbeta.view(beta.shape),
        dh0=walk.in_order(adjoint),
    )


@dataclass(frozen=True)
class _Step:
    """One token of each of the `count` longest sequences: its flat indices."""

    count: int
    tokens: torch.Tensor


class _Walk:
    """A call in FP64: flat tokens, q and k normalised and repeated to HV heads, sequences longest first."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None,
        initial_state: torch.Tensor | None,
        use_qk_l2norm: bool,
        boundaries: Sequence[int] | None,
    ):
        batch, tokens, v_heads, v_dim = v.shape
        dim = q.shape[-1]
        if boundaries is None:
            boundaries = [row * tokens for row in range(batch + 1)]
        self.scale = dim**-0.5 if scale is None else scale
        self.q, self.k = (_heads(_normalised(x.double(), use_qk_l2norm), v_heads) for x in (q, k))
        self.v = v.double().reshape(-1, v_heads, v_dim)
        self.per_channel = g.dim() == 4
        self.g = g.double().flatten(0, 1)
        self.beta = beta.double().reshape(-1, v_heads)
        lengths = torch.tensor(boundaries).diff()
        order = lengths.argsort(descending=True, stable=True)
        self._lengths = lengths[order].tolist()
        self._order = order.to(v.device)
        self._starts = torch.tensor(boundaries)[:-1][order].to(v.device)
        if initial_state is None:
            self.initial = self.v.new_zeros((len(self._lengths), v_heads, dim, v_dim))
        else:
            self.initial = self.by_length(initial_state.double())

    def steps(self) -> Iterator[_Step]:
        active = len(self._lengths)
        for i in range(max(self._lengths, default=0)):
            while self._lengths[active - 1] <= i:
                active -= 1
            yield _Step(active, self._starts[:active] + i)

    def advance(self, state: torch.Tensor, step: _Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """S, S' and r of the step's tokens."""
        at = step.tokens
        decayed = self.decay(at) * state
        residual = self.v[at] - _read(decayed, self.k[at])
        return decayed + _outer(self.k[at], self.beta[at][..., None] * residual), decayed, residual

    def decay(self, tokens: torch.Tensor) -> torch.Tensor:
        """a of these tokens, [n, HV, K or 1, 1]."""
        a = self.g[tokens].exp()[..., None]
        return a if self.per_channel else a[..., None]

    def by_length(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences longest first, from the caller's order."""
        return x[self._order]

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences in the caller's order, from longest first."""
        y = torch.empty_like(x)
        y[self._order] = x
        return y


def _read(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """S^T x: [n, h, K, V], [n, h, K] -> [n, h, V]."""
    return (x[..., None, :] @ state).squeeze(-2)


def _write(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """S x: [n, h, K, V], [n, h, V] -> [n, h, K]."""
    return (state @ x[..., None]).squeeze(-1)


def _outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[..., :, None] * y[..., None, :]


def _inverse_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _normalised(x: torch.Tensor, use_qk_l2norm: bool) -> torch.Tensor:
    return x * _inverse_norm(x) if use_qk_l2norm else x


def _norm_backward(x: torch.Tensor, grad: torch.Tensor, use_qk_l2norm: bool) -> torch.Tensor:
    if not use_qk_l2norm:
        return grad
    x = x.double()
    inverse = _inverse_norm(x)
    x_hat = x * inverse
    return inverse * (grad - x_hat * (x_hat * grad).sum(-1, keepdim=True))


def _heads(x: torch.Tensor, v_heads: int) -> torch.Tensor:
    """[B, T, H, K] -> [B * T, HV, K]."""
    return x.flatten(0, 1).repeat_interleave(v_heads // x.shape[2], dim=1)


def _group_sum(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[B * T, HV, K] -> the shape of x [B, T, H, K]."""
    heads = x.shape[2]
    return grad.view(grad.shape[0], heads, grad.shape[1] // heads, grad.shape[2]).sum(2).view(x.shape)
