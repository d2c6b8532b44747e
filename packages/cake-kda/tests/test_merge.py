"""The merge kernel that this op carries against its twin: every build, the same bits."""

from __future__ import annotations

import pytest
import torch

from cake.core import state_chain
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _stages

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture
def merge(device):
    return _stages.stages(_stages.backend_name(device, None)).merge


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("ncols", state_chain.STATE_COLUMNS, ids="C{}".format)
@pytest.mark.parametrize(("n", "length", "heads"), [(1, 16, 4), (5, 7, 3), (130, 3, 2)])
def test_every_build(merge, device, n, length, heads, ncols, transposed):
    tiles = n * length
    chains = tuple(
        tuple((i, i if (i - first) % 5 else -1, i) for i in range(first, first + length))
        for first in range(0, tiles, length)
    )
    random = torch.Generator(device).manual_seed(0)
    b = torch.randn(tiles, heads, 128, ncols, generator=random, device=device)
    m = torch.randn(tiles, heads, 128, 128, generator=random, device=device) / 12
    live = torch.randint(0, 4, (tiles, heads), generator=random, device=device, dtype=torch.int32)
    m[live == 0] = torch.nan  # never looked at
    how = {"live": live, "transposed": transposed}
    expected = state_chain.merge(b.cpu(), m.cpu(), chains, tiles, live=live.cpu(), transposed=transposed)
    with poisoned_empty():
        results = [merge(b, m, chains, tiles, columns=x, **how) for x in (None, *state_chain.COLUMNS)]
    # M and S enter a product with 16 bits: 3e-6 of it, and 1.2e-5 along chains that hardly forget.
    assert relative_error(results[0].cpu(), expected) < 2e-5
    for result in results[1:]:
        assert_bitwise_equal("merged states", result, results[0])


@pytest.mark.parametrize("change", [{"columns": 12}, {"chains": ()}, {"n_out": 1}])
def test_refusals(merge, device, change):
    b, m = (torch.randn(2, 1, 128, 128, device=device) for _ in range(2))
    arguments = {"chains": (((0, -1, 1), (1, 1, -1)),), "n_out": 2} | change
    with pytest.raises(ValueError, match=r"must"):
        merge(b, m, **arguments)
