"""Products of tokens within a chunk under decays of their own in every channel, with no factor above 1.

2^(b_i - b_j) is at most 1 for i >= j, but 2^b_i and 2^-b_j apart would under- and overflow. Every pair i > j
meets exactly once in a binary tree over the chunk's rows: at the node of 2 w rows that has i in its right
half and j in its left one. With r = b of the left half's last row, 2^(b_i - b_j) = 2^(b_i - r) 2^(r - b_j),
both at most 1 and neither smaller than the product: nothing underflows that isn't 0 anyway. A node is a
product of bf16 operands with fp32 sums; the diagonal, i = j, has no decay.

The gradient of b is a difference of large sums in which the two sides of each pair cancel. They do so to fp32
because both take the operands of a product as they were rounded for it (`backward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cake.core.sequences import CHUNK

WIDTHS = (32, 16, 8, 4, 2, 1)


def forward(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A_ij = sum_c q_ic k_jc 2^(b_ic - b_jc) for i >= j and N_ij alike with k_ic for i > j; 0 elsewhere.

    Args:
        q, k: fp32 [..., 64, K].
        b: fp32 [..., 64, K], falling along the rows.

    Returns:
        A and N, fp32 [..., 64, 64].
    """
    a, n = (b.new_zeros((*b.shape[:-1], CHUNK)) for _ in range(2))
    a.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for node in _nodes(b):
        kt = tf32(node.left(k) * node.fade)
        node.square(a).copy_(tf32(node.right(q) * node.grow) @ kt.mT)
        node.square(n).copy_(tf32(node.right(k) * node.grow) @ kt.mT)
    return a, n


@dataclass(frozen=True)
class Gradients:
    """What the pairs of a chunk add to gradients: of q, of k in its two roles and of b; fp32 [..., 64, K]."""

    q: torch.Tensor
    query_key: torch.Tensor
    key: torch.Tensor
    b: torch.Tensor


def backward(
    da: torch.Tensor, dn: torch.Tensor, live: torch.Tensor, q: torch.Tensor, k: torch.Tensor, b: torch.Tensor
) -> Gradients:
    """Gradients of ``(A * da).sum() + (N * dn * live).sum()``.

    Args:
        da: [..., 64, 64], lower triangular, bf16 values in fp32.
        dn: [..., 64, 64], below the diagonal, bf16 values in fp32.
        live: [..., 64, 1], 1 or 0: rows of dn that count. `query_key`, the gradient of the k of rows i, has
            all of them; `key` and `b` those that count.
        q, k, b: as in `forward`.
    """
    diagonal = da.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, key = diagonal * k, diagonal * q
    query_key, db = torch.zeros_like(k), torch.zeros_like(k)
    for node in _nodes(b):
        qt, kqt = bf16(node.right(q) * node.grow), bf16(node.right(k) * node.grow)
        kt = bf16(node.left(k) * node.fade)
        da_here, dn_here, counts = node.square(da), node.square(dn), node.right(live)
        to_q, to_query_key = da_here @ kt, dn_here @ kt
        to_key = da_here.mT @ qt + (counts * dn_here).mT @ kqt
        node.right(dq).add_(node.grow * to_q)
        node.right(query_key).add_(node.grow * to_query_key)
        node.left(key).add_(node.fade * to_key)
        node.right(db).add_(qt * to_q + counts * kqt * to_query_key)
        node.left(db).sub_(kt * to_key)
    return Gradients(dq, query_key, key, db)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bf16, in fp32."""
    return x.to(torch.bfloat16).float()


def tf32(x: torch.Tensor) -> torch.Tensor:
    """x rounded to the 10 bits of a mantissa that tensor cores keep of fp32."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True)
class _Level:
    """All nodes of 2 w rows, side by side.

    grow: 2^(b_i - r) [..., nodes, w, K] of the right halves.
    fade: 2^(r - b_j) [..., nodes, w, K] of the left ones.
    """

    width: int
    grow: torch.Tensor
    fade: torch.Tensor

    def left(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 64, d] -> view [..., nodes, w, d]."""
        return _halves(x, self.width)[..., 0, :, :]

    def right(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 64, d] -> view [..., nodes, w, d]."""
        return _halves(x, self.width)[..., 1, :, :]

    def square(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 64, 64] -> view [..., nodes, w, w]: rows of the right halves, columns of the left ones."""
        w = self.width
        nodes = CHUNK // (2 * w)
        tiles = x.view(*x.shape[:-2], nodes, 2, w, nodes, 2, w)
        return tiles.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].movedim(-1, -3)


def _nodes(b: torch.Tensor) -> Iterator[_Level]:
    for width in WIDTHS:
        halves = _halves(b, width)
        left, right = halves[..., 0, :, :], halves[..., 1, :, :]
        border = left[..., -1:, :]
        yield _Level(width, (right - border).exp2(), (border - left).exp2())


def _halves(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.view(*x.shape[:-2], CHUNK // (2 * width), 2, width, x.shape[-1])
