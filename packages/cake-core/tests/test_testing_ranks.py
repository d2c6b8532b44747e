"""The ranks that tests of context parallelism run on."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from cake.core.testing import Ranks


def add(group, x):
    total = x + dist.get_rank(group)
    dist.all_reduce(total, group=group)
    return dist.get_world_size(group), total


def fail_on_one(group, rank):
    if dist.get_rank(group) == rank:
        raise KeyError("on purpose")
    return "fine"


def die_on_one(group, rank):
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as pool:
        yield pool


@pytest.mark.parametrize(("world", "total"), [(1, 5), (2, 11), (3, 18)])
def test_worlds_of_any_size(ranks, world, total):
    results = ranks.values(add, torch.tensor(5), world=world)
    assert [(size, int(x)) for size, x in results] == [(world, total)] * world


def test_an_error_on_one_rank(ranks):
    outcomes = ranks.run(fail_on_one, 1)
    assert [outcome.error for outcome in outcomes] == [None, "KeyError", None]
    assert [outcome.value for outcome in outcomes] == ["fine", None, "fine"]
    with pytest.raises(AssertionError, match=r"rank 2: Traceback[\s\S]*on purpose"):
        ranks.values(fail_on_one, 2)
    assert ranks.values(fail_on_one, 7) == ["fine"] * 3


def test_a_rank_that_dies():
    with Ranks(2) as pool:
        outcomes = pool.run(die_on_one, 1)
    assert outcomes[1].gone
    assert (outcomes[0].gone, outcomes[0].error) == (False, "RuntimeError")
