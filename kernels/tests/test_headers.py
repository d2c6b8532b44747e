"""The device library's primitives against plain products and inverses: on the GPU, and under the emulator."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

from cake.core import loader


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("sm_90a"))])
def device(request):
    return request.param


@cache
def on_gpu():
    return loader.load_from(Path(__file__).parent, "header_tests", arch="sm_90a")


@pytest.fixture
def library(device, request):
    if device == "cpu":
        return request.getfixturevalue("emulator").load(Path(__file__).parent, "header_tests")
    return on_gpu()


@pytest.fixture
def stream(device):
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else 0


@pytest.mark.parametrize("k", [64, 128], ids="K{}".format)
@pytest.mark.parametrize("n", [64, 128], ids="N{}".format)
@pytest.mark.parametrize("mn_major_b", [False, True], ids=["B-K-major", "B-MN-major"])
@pytest.mark.parametrize("from_a", [0, 1, 2], ids=["A-registers", "A-K-major", "A-MN-major"])
def test_wgmma_product(library, device, stream, from_a, mn_major_b, n, k):
    generator = torch.Generator(device).manual_seed(n + k)
    a = torch.randn(64, k, generator=generator, device=device).bfloat16()
    b = torch.randn(n, k, generator=generator, device=device).bfloat16()
    d = torch.full((64, n), float("nan"), device=device)
    library.wgmma_product(
        from_a,
        mn_major_b,
        a.T.contiguous() if from_a == 2 else a,
        b.T.contiguous() if mn_major_b else b,
        d,
        stream,
    )
    expected = a.double() @ b.double().T
    # Products of bf16 are exact in fp32: what is left is the order of 128 sums.
    assert (d - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("n", [8, 16, 32], ids="N{}".format)
def test_narrow_products_are_columns_of_a_wide_one(library, device, stream, n):
    generator = torch.Generator(device).manual_seed(n)
    a = torch.randn(64, 128, generator=generator, device=device).bfloat16()
    b = torch.randn(64, 128, generator=generator, device=device).bfloat16()
    wide = torch.full((64, 64), float("nan"), device=device)
    library.wgmma_product(0, False, a, b, wide, stream)
    for first in range(0, 64, n):
        d = torch.full((64, n), float("nan"), device=device)
        library.narrow_product(a, b[first : first + n].contiguous(), d, stream)
        assert torch.equal(d, wide[:, first : first + n])


def lower_triangles():
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(64, 64, generator=generator)
    keys = torch.nn.functional.normalize(torch.randn(64, 128, generator=generator), dim=1)
    beta = torch.rand(64, 1, generator=generator)
    return {
        "zero": torch.zeros(64, 64),
        "keys": beta * (keys @ keys.T),
        "repeated keys": torch.ones(64, 64),
        "beta 2 and repeated keys": 1.9 * torch.ones(64, 64),
        "long keys": 0.3 * random,
    }


@pytest.mark.parametrize("name", lower_triangles())
def test_inverse(library, device, stream, name):
    lower = lower_triangles()[name].to(device)
    x = torch.full((64, 64), float("nan"), device=device)
    library.invert(lower, x, stream)
    unit = torch.eye(64, device=device, dtype=torch.float64)
    expected = torch.linalg.solve_triangular(unit + lower.double().tril(-1), unit, upper=False)
    error = (x - expected).abs().max() / expected.abs().max()
    # Split tf32 keeps about 2^-21 per product; the inverse is rounded to bf16, 2^-9, when it is used.
    assert error <= 1e-4
    assert (x.triu(1) == 0).all()
    assert (x.diagonal() == 1).all()


@pytest.mark.parametrize("name", lower_triangles())
def test_inverse_by_a_warp(library, device, stream, name):
    lower = lower_triangles()[name].to(device)
    x = torch.full((64, 64), float("nan"), device=device, dtype=torch.bfloat16)
    library.invert_by_warp(lower, x, stream)
    unit = torch.eye(64, device=device, dtype=torch.float64)
    expected = torch.linalg.solve_triangular(unit + lower.double().tril(-1), unit, upper=False)
    # What bf16 leaves of the value itself, and 2^-17 for each split operand on the way.
    allowed = expected.abs() * 2**-8 + expected.abs().max() * 1e-4
    assert ((x.double() - expected).abs() <= allowed).all()
    assert (x.triu(1) == 0).all()
    assert (x.diagonal() == 1).all()


def test_transposed_fragments(library, device, stream):
    x = torch.randn(64, 128, device=device).bfloat16()
    y = torch.full((128, 64), float("nan"), device=device)
    z = torch.full((64, 128), float("nan"), device=device, dtype=torch.bfloat16)
    library.transpose_channels(x, y, z, stream)
    assert torch.equal(y, x.T.float())
    assert torch.equal(z, 2 * x)


TENSORS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "wide rows": lambda x: torch.cat([x, x], -1)[..., :128],
    "a head for all": lambda x: x[:, :, :1].expand(x.shape),
    "one batch": lambda x: x[:1],
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "given another address"])
@pytest.mark.parametrize("layout", TENSORS)
def test_whole_tiles(library, device, stream, layout, elsewhere):
    x = TENSORS[layout](torch.randn(2, 150, 3, 128, device=device).bfloat16())
    y = torch.full(x.shape, float("nan"), device=device, dtype=torch.bfloat16)
    seen = torch.full((64, 128), float("nan"), device=device, dtype=torch.bfloat16)
    batch, token, head = x.shape[0] - 1, 100, 1
    # A thread that has asked nothing of the GPU yet, as one of autograd's may be.
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(library.copy_tile, x, y, seen, batch, token, head, elsewhere, stream).result()
    # 14 of the tokens lie behind the last.
    assert torch.equal(seen[:50], x[batch, token:, head])
    assert (seen[50:] == 0).all()
    assert torch.equal(y[batch, token:, head], x[batch, token:, head])
    y[batch, token:, head] = torch.nan
    assert y.isnan().all()
