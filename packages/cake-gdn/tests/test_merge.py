"""The merge kernel against its twin: every build, the same bits."""

from __future__ import annotations

import pytest
import torch

from cake.core import state_chain
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.gdn import _stages

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture
def merge(device):
    return _stages.stages(_stages.backend_name(device)).merge


def chains_of(n, length):
    """n chains of up to `length` links; every state but the last of the longest is kept."""
    made, tile = [], 0
    for c in range(n):
        steps = []
        for i in range(1 + (length + c) % length):
            steps.append((tile, tile if i % 5 else -1, tile + 1 if i + 1 < length else -1))
            tile += 1
        made.append(tuple(steps))
    return tuple(made), tile


def maps_of(device, tiles, heads, ncols, seed=0):
    random = torch.Generator(device).manual_seed(seed)
    b = torch.randn(tiles, heads, 128, ncols, generator=random, device=device)
    m = torch.randn(tiles, heads, 128, 128, generator=random, device=device) / 12
    live = torch.randint(0, 4, (tiles, heads), generator=random, device=device, dtype=torch.int32)
    return b, m, live


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("ncols", state_chain.STATE_COLUMNS, ids="C{}".format)
@pytest.mark.parametrize(
    ("n", "length", "heads"), [(1, 1, 1), (1, 16, 8), (5, 7, 3), (130, 3, 2), (1, 130, 1)]
)
def test_every_build(merge, device, n, length, heads, ncols, transposed):
    chains, tiles = chains_of(n, length)
    b, m, live = maps_of(device, tiles, heads, ncols)
    m[live == 0] = torch.nan  # never looked at
    rows = tiles + 1
    expected = state_chain.merge(
        b.double().float().cpu(), m.cpu(), chains, rows, live=live.cpu(), transposed=transposed
    )
    results = []
    for columns in (None, *state_chain.COLUMNS):
        out = torch.zeros(rows, heads, 128, ncols, device=device)
        with poisoned_empty():
            results.append(
                merge(b, m, chains, rows, live=live, transposed=transposed, columns=columns, out=out)
            )
    written = sorted({row for steps in chains for _, _, row in steps if row >= 0})
    if written:
        # M and S enter a product with 16 bits: 3e-6 of it, and 1.2e-5 along chains that hardly forget.
        assert relative_error(results[0][written].cpu(), expected[written]) < 2e-5
    for result in results[1:]:
        assert_bitwise_equal("merged states", result, results[0])
    rest = sorted(set(range(rows)) - set(written))
    assert not results[0][rest].any()


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_maps_that_forget_nothing(merge, device, transposed):
    """131072 tokens in segments of 256, without decay and without keys."""
    random = torch.Generator(device).manual_seed(0)
    b = torch.randn(512, 2, 128, 128, generator=random, device=device)
    m = torch.eye(128, device=device).repeat(512, 2, 1, 1)
    chains = (tuple((i, i, i) for i in range(512)),)
    result = merge(b, m, chains, 512, transposed=transposed)
    # A state's own error is about 2e-3.
    assert relative_error(result, b.double().cumsum(0)) < 1e-4


def test_without_flags(merge, device):
    chains, tiles = chains_of(3, 6)
    b, m, _ = maps_of(device, tiles, 4, 128)
    ones = torch.ones(tiles, 4, dtype=torch.int32, device=device)
    assert_bitwise_equal(
        "merged states",
        merge(b, m, chains, tiles + 1, out=torch.zeros(tiles + 1, 4, 128, 128, device=device)),
        merge(b, m, chains, tiles + 1, live=ones, out=torch.zeros(tiles + 1, 4, 128, 128, device=device)),
    )


@pytest.mark.parametrize("change", [{"columns": 12}, {"chains": ()}, {"n_out": 1}])
def test_refusals(merge, device, change):
    b, m, _ = maps_of(device, 2, 1, 128)
    arguments = {"chains": (((0, -1, 1), (1, 1, -1)),), "n_out": 2} | change
    with pytest.raises(ValueError, match=r"must"):
        merge(b, m, **arguments)
