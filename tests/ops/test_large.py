"""Tensors whose elements outnumber 2^31: every address is 64 bits wide."""

from __future__ import annotations

import pytest
import torch

from cake.core.testing import assert_bitwise_equal

HEADS, DIM = 64, 128
# The first sequence alone fills q, k, v, o and their gradients past 2^31 elements (of kda g and what prep
# makes of them too), and the tape past 2^32.
LENGTHS = (2**31 // (HEADS * DIM) + 64, 130)
PEAK_BYTES = {"gdn": 80 * 2**30, "kda": 100 * 2**30}


@pytest.mark.gpu
@pytest.mark.slow
def test_a_sequence_behind_2_to_the_31_elements_has_the_bits_it_has_alone(op):
    if torch.cuda.mem_get_info()[0] < PEAK_BYTES[op.name]:
        pytest.skip(f"needs {PEAK_BYTES[op.name] >> 30} GiB of free GPU memory")
    total = sum(LENGTHS)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, total, *shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = (normal(HEADS, DIM) for _ in range(4))
    g = normal(HEADS) if op.name == "gdn" else normal(HEADS, DIM)
    g, beta = -g.abs(), normal(HEADS).sigmoid()
    last = slice(LENGTHS[0], total)
    packed = forward_and_gradients(op, (q, k, v, g, beta), do, LENGTHS, last)
    alone = forward_and_gradients(op, tuple(x[:, last] for x in (q, k, v, g, beta)), do[:, last], LENGTHS[1:])
    for name, x in alone.items():
        assert_bitwise_equal(name, packed[name], x)


def forward_and_gradients(op, inputs, do, lengths, keep=slice(None)):
    """o and the inputs' gradients, of the tokens to keep."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    o, _ = op.chunk(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=bounds)
    o.backward(do)
    assert torch.isfinite(o).all()
    found = {"o": o.detach()} | {
        f"d{name}": x.grad for name, x in zip(("q", "k", "v", "g", "beta"), leaves, strict=True)
    }
    return {name: x[:, keep].clone() for name, x in found.items()}
