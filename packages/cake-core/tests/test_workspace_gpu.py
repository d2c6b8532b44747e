"""The pools on a real GPU: streams, captures and memory that comes back."""

import pytest
import torch

from cake.core import config, workspace

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
ELEMENTS = MIB // 4


@pytest.fixture
def pool():
    workspace.release()
    with config.temporary(cake_workspace_pool_bytes=4 * MIB):
        yield workspace
    workspace.release()


def take(role="a", elements=ELEMENTS, device="cuda"):
    return workspace.take("toy", role, (elements,), torch.float32, device)


def test_at_bound_zero_memory_goes_back_to_the_allocator():
    workspace.release()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    take()
    assert torch.cuda.memory_allocated() == before
    assert workspace.stats().bytes_held == 0


def test_a_buffer_serves_again_and_release_frees_it(pool):
    before = torch.cuda.memory_allocated()
    addresses = {take().data_ptr() for _ in range(3)}
    assert len(addresses) == 1
    assert torch.cuda.memory_allocated() == before + MIB
    assert pool.release() == MIB
    assert torch.cuda.memory_allocated() == before


def test_streams_have_pools_of_their_own(pool):
    side = torch.cuda.Stream()
    default = take().data_ptr()
    with torch.cuda.stream(side):
        aside = take().data_ptr()
        assert take().data_ptr() == aside
    assert aside != default
    assert take().data_ptr() == default
    assert pool.stats().pools == 2


def test_work_on_one_stream_is_ordered_though_the_host_runs_ahead(pool):
    side = torch.cuda.Stream()
    hits = pool.stats().hits
    results = []
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for i in range(50):
            x = take()
            x.fill_(i)
            results.append(x.sum())
            del x
    torch.cuda.synchronize()
    assert [int(r) // ELEMENTS for r in results] == list(range(50))
    assert pool.stats().hits - hits == 49


def test_capture_goes_past_the_pool_and_the_graph_keeps_its_memory(pool):
    source = torch.zeros(ELEMENTS, device="cuda")
    pooled = take().data_ptr()
    held = pool.stats().bytes_held
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch = take()
        assert scratch.data_ptr() != pooled
        scratch.copy_(source)
        scratch += 1
        result = scratch * 2
        del scratch
    assert pool.stats().bytes_held == held
    for value in range(20):
        source.fill_(value)
        graph.replay()
        take().fill_(-1.0)
        assert (result == 2 * (value + 1)).all()


def test_a_take_is_no_device_synchronisation(pool):
    misses = pool.stats().misses
    torch.cuda.set_sync_debug_mode("error")
    try:
        for elements in (8, 4096, 8, 65536):
            take(elements=elements)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pool.stats().misses - misses == 3
