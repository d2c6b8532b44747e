"""The emulator runs right kernels and reports wrong ones."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SEEDS = range(8)
NAMES = (
    "none", "no arrival", "two arrivals", "full twice", "no full wait", "no empty wait", "no warp sync",
    "no copy wait", "lanes apart", "past the end", "overwritten",
)  # fmt: skip


@pytest.fixture(scope="module")
def library(emulator):
    return emulator.load(HERE, "emulator_faults")


def pipe(library, fault, seed):
    """What the kernel makes of five tiles, and what it should."""
    x, bias = torch.randn(5, 64), torch.randn(64)
    out = torch.full_like(x, float("nan"))
    library.schedule(seed)
    library.run_pipe(x, bias, out, NAMES.index(fault), 0)
    return out, x + x.view(5, 32, 2).flip(-1).view(5, 64) + bias


def square(library, fault, seed):
    a = torch.randn(64, 64).bfloat16()
    d = torch.full((64, 64), float("nan"))
    library.schedule(seed)
    library.run_square(a, d, NAMES.index(fault), 0)
    return d, a.float() @ a.float().T


@pytest.mark.parametrize("seed", SEEDS)
def test_right_kernels(library, seed):
    out, expected = pipe(library, "none", seed)
    assert torch.equal(out, expected)
    d, expected = square(library, "none", seed)
    torch.testing.assert_close(d, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no arrival", r"pipe: CTA \(0, 0, 0\): deadlock(.|\n)*mbarrier at byte \d+ .* 1 of 2 arrivals"),
        ("two arrivals", r"deadlock(.|\n)*mbarrier|left with 1 of 2 arrivals"),
        ("full twice", "got more arrivals in phase 0 than the 1 that it counts"),
        ("lanes apart", "deadlock(.|\n)*all lanes of its warp to come to a shuffle"),
        ("past the end", "4 bytes at byte .* lie outside of it"),
    ],
)
def test_what_stops_a_kernel(library, fault, message, seed):
    with pytest.raises(RuntimeError, match=message):
        pipe(library, fault, seed)
    out, expected = pipe(library, "none", seed)  # the next launch is as good as ever
    assert torch.equal(out, expected)


@pytest.mark.parametrize("run", [pipe, square], ids=["pipe", "square"])
@pytest.mark.parametrize(
    "fault",
    ["no full wait", "no empty wait", "no warp sync", "no copy wait", "overwritten"],
)
def test_what_gives_wrong_values(library, fault, run):
    """Of a wait that is missing some schedule shows it."""

    def wrong(seed):
        try:
            out, expected = run(library, fault, seed)
        except RuntimeError:
            return True
        return not torch.allclose(out, expected, rtol=1e-3, atol=1e-3)

    meant = square if fault == "overwritten" else pipe
    assert any(wrong(seed) for seed in SEEDS) is (run is meant)


def test_arguments_are_checked_as_on_a_gpu(library):
    with pytest.raises(ValueError, match=r"a must be \[64, 64\], got \[64, 32\]"):
        library.run_square(torch.zeros(64, 32).bfloat16(), torch.zeros(64, 64), 0, 0)
