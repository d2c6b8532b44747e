"""Exchanges: everyone's tiles, and ranks that run different calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cake.core.cp._exchange import Exchange
from cake.core.testing import Ranks


class _OnGpu(Exchange):
    """What a GPU does, on a CPU, which raises at once what a GPU asserts."""

    _on_cpu = property(lambda self: False, lambda self, value: None)


def exchanged(group, kinds, digests, gpu):
    rank = dist.get_rank(group)
    kind = _OnGpu if gpu else Exchange
    cpu = torch.device("cpu")
    with torch.device("meta"):  # a default device is nobody's concern here
        exchange = kind(kinds[rank], 2, 3, 128, digests[rank], cpu, group, collective=True, tagged=True)
    exchange.tiles()[1] = rank + 1
    exchange.start()
    tiles = exchange.wait()
    assert not gpu or tiles.is_contiguous()
    return tiles


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as pool:
        yield pool


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "as on a gpu"])
def test_everyones_tiles_arrive(ranks, gpu):
    expected = torch.tensor([0.0, 1.0, 0.0, 2.0])[:, None, None, None].expand(4, 3, 128, 128)
    for tiles in ranks.values(exchanged, ("forward",) * 2, (2**32 - 1,) * 2, gpu):
        assert torch.equal(tiles, expected)


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize(
    ("kinds", "digests"), [(("forward", "backward"), (7, 7)), (("backward", "backward"), (7, 8))]
)
def test_ranks_that_run_different_calls_get_an_error(ranks, kinds, digests, gpu):
    outcomes = ranks.run(exchanged, kinds, digests, gpu)
    assert [outcome.error for outcome in outcomes] == ["RuntimeError"] * 2
    for outcome in outcomes:
        assert "is activation checkpointing on for some ranks only?" in outcome.message
