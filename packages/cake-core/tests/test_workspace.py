"""The pools' rules, on a GPU that is made up: tensors lie in CPU memory, streams are numbers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cake.core import config, hooks, workspace
from cake.core.testing import poisoned_empty
from cake.core.workspace import Pools, Stats, _TorchDevices

KIB = 1024
CPU = torch.device("cpu")


class FakeGpu(_TorchDevices):
    """PyTorch's CPU memory behind GPUs 0 and 1, with streams and capture set by the test."""

    def __init__(self):
        self.current = 0
        self.streams = {0: 0, 1: 0}
        self.captures = set()
        self.allocated = []
        self.plain = []
        self.says_holders = True

    def resolve(self, device):
        device = torch.device(device)
        return torch.device("cuda", self.current) if device == torch.device("cuda") else device

    def stream(self, device):
        return self.streams[device.index]

    def capturing(self, device):
        return (device.index, self.streams[device.index]) in self.captures

    def empty(self, shape, dtype, device):
        self.plain.append(tuple(shape))
        return super().empty(shape, dtype, CPU)

    def allocate(self, nbytes, device):
        self.allocated.append((nbytes, device.index, self.streams[device.index]))
        return super().allocate(nbytes, CPU)

    def holders(self, memory):
        return super().holders(memory) if self.says_holders else None

    def tensor(self, memory, shape, dtype, device):
        return super().tensor(memory, shape, dtype, CPU)


class Workspace:
    """A pool on a made-up GPU, and a bound that the test may change."""

    def __init__(self, bound):
        self.gpu = FakeGpu()
        self.bound = bound
        self.pools = Pools(self.gpu, lambda: self.bound)

    def take(self, nbytes, role="a", op="toy", device="cuda"):
        return self.pools.take(op, role, (nbytes // 4,), torch.float32, device)

    def address(self, *args, **kwargs):
        """Take and give back at once."""
        return self.take(*args, **kwargs).data_ptr()

    @property
    def stats(self):
        return self.pools.stats()


def lies_in(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def memory_of_the_only_buffer(ws):
    (pool,) = ws.pools._pools.values()
    (buffer,) = pool.buffers.values()
    return StorageWeakRef(buffer.memory)


def test_at_bound_zero_nothing_is_kept():
    ws = Workspace(0)
    for _ in range(3):
        ws.take(KIB)
    assert ws.gpu.allocated == []
    assert ws.gpu.plain == [(256,)] * 3
    assert ws.stats == Stats()
    assert ws.pools.release() == 0


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (1, 0, 4), (7, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("bound", [0, KIB])
def test_tensor_is_as_torch_empty_would_make_it(shape, dtype, bound):
    ws = Workspace(bound)
    for _ in range(2):
        x = ws.pools.take("toy", "a", shape, dtype, "cuda")
        plain = torch.empty(shape, dtype=dtype)
        assert x.shape == plain.shape
        assert x.dtype is dtype
        assert x.stride() == plain.stride()
        assert x.is_contiguous()
        assert not x.requires_grad
        assert not x._is_view()
        assert x.data_ptr() % 64 == 0
        x.fill_(1)
        del x


def test_a_buffer_serves_again_whatever_shape_and_dtype_fit():
    ws = Workspace(4 * KIB)
    first = ws.address(2 * KIB)
    assert ws.address(KIB) == first
    assert ws.pools.take("toy", "a", (3, 5), torch.bfloat16, "cuda").data_ptr() == first
    assert ws.gpu.allocated == [(2 * KIB, 0, 0)]
    assert ws.stats == Stats(bytes_held=2 * KIB, buffers=1, pools=1, hits=2, misses=1)


def test_a_larger_request_replaces_the_buffer():
    ws = Workspace(4 * KIB)
    ws.take(KIB)
    ws.take(3 * KIB)
    assert ws.stats == Stats(bytes_held=3 * KIB, buffers=1, pools=1, misses=2)


def test_the_smaller_buffer_is_freed_before_the_larger_is_allocated():
    ws = Workspace(4 * KIB)
    ws.take(KIB)
    smaller = memory_of_the_only_buffer(ws)
    expired = []
    allocate = ws.gpu.allocate

    def observed(nbytes, device):
        expired.append(smaller.expired())
        return allocate(nbytes, device)

    ws.gpu.allocate = observed
    assert not smaller.expired()
    ws.take(2 * KIB)
    assert expired == [True]


def test_roles_and_ops_never_share():
    ws = Workspace(8 * KIB)
    tensors = [ws.take(KIB, role, op) for op in ("gdn", "kda") for role in ("a", "b")]
    assert len({x.data_ptr() for x in tensors}) == 4
    del tensors
    assert len({ws.address(KIB, role, op) for op in ("gdn", "kda") for role in ("a", "b")}) == 4
    assert ws.stats.hits == 4


def keep_tensor(x):
    return x


def keep_view(x):
    return x[3:5]


def keep_storage_in_another_dtype(x):
    return x.view(torch.int16)


def keep_in_graph(x):
    weight = torch.ones_like(x, requires_grad=True)
    return weight * x.fill_(1)


@pytest.mark.parametrize("keep", [keep_tensor, keep_view, keep_storage_in_another_dtype, keep_in_graph])
def test_what_is_still_held_is_not_handed_out(keep):
    ws = Workspace(4 * KIB)
    first = ws.take(KIB)
    address = first.data_ptr()
    held = keep(first)
    del first
    second = ws.take(KIB)
    assert second.data_ptr() != address
    assert ws.stats.busy == 1
    del held
    assert ws.take(KIB).data_ptr() == address
    assert ws.stats == Stats(bytes_held=KIB, buffers=1, pools=1, hits=1, misses=1, busy=1)


def test_a_nested_take_of_the_same_key_gets_other_memory():
    ws = Workspace(4 * KIB)
    outer = ws.take(KIB).fill_(1)
    inner = ws.take(KIB).fill_(2)
    innermost = ws.take(KIB).fill_(3)
    assert (outer == 1).all()
    assert (inner == 2).all()
    assert (innermost == 3).all()


def test_a_backward_sees_what_its_forward_saved():
    ws = Workspace(4 * KIB)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            scratch = ws.take(x.numel() * 4)
            scratch.copy_(x)
            ctx.save_for_backward(scratch)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (scratch,) = ctx.saved_tensors
            return 2 * scratch * grad

    inputs = [torch.full((8,), float(i), requires_grad=True) for i in range(3)]
    sum(Square.apply(x).sum() for x in inputs).backward()
    for i, x in enumerate(inputs):
        assert (x.grad == 2 * i).all()
    assert ws.stats.busy == 2


def test_every_use_has_its_own_version_counter_and_graph():
    ws = Workspace(4 * KIB)
    weight = torch.ones(256, requires_grad=True)
    first = ws.take(KIB)
    first.copy_(weight)
    assert first.requires_grad
    del first
    second = ws.take(KIB)
    assert ws.stats.hits == 1
    assert not second.requires_grad
    assert second._version == ws.take(KIB, "fresh")._version


def test_inference_mode_leaves_no_trace_in_the_pool():
    ws = Workspace(4 * KIB)
    with torch.inference_mode():
        address = ws.take(KIB).fill_(1).data_ptr()
    x = ws.take(KIB).fill_(2)
    assert x.data_ptr() == address
    weight = torch.ones(256, requires_grad=True)
    (weight * x).sum().backward()
    assert (weight.grad == 2).all()


def test_each_stream_and_device_has_its_own_pool_and_bound():
    ws = Workspace(KIB)
    addresses = set()
    for ws.gpu.current, stream in [(0, 0), (0, 7), (1, 0), (1, 7)]:
        ws.gpu.streams[ws.gpu.current] = stream
        addresses.add(ws.address(KIB))
    assert len(addresses) == 4
    assert ws.gpu.allocated == [(KIB, 0, 0), (KIB, 0, 7), (KIB, 1, 0), (KIB, 1, 7)]
    assert ws.stats == Stats(bytes_held=4 * KIB, buffers=4, pools=4, misses=4)
    # Back on the first stream: its own buffer again.
    ws.gpu.current, ws.gpu.streams[0] = 0, 0
    assert ws.address(KIB) in addresses
    assert ws.stats.hits == 1


def test_a_device_without_an_index_is_the_current_one():
    ws = Workspace(KIB)
    ws.gpu.current = 1
    assert ws.address(KIB, device="cuda") == ws.address(KIB, device="cuda:1")
    assert ws.address(KIB, device="cuda") == ws.address(KIB, device=torch.device("cuda", 1))


def test_capture_goes_past_the_pool_on_the_capturing_stream_alone():
    ws = Workspace(4 * KIB)
    pooled = ws.address(KIB)
    ws.gpu.captures = {(0, 5)}
    ws.gpu.streams[0] = 5
    captured = [ws.take(KIB) for _ in range(2)]
    assert not lies_in(*captured)
    assert ws.gpu.plain == [(256,)] * 2
    assert ws.stats == Stats(bytes_held=KIB, buffers=1, pools=1, misses=1, bypasses=2)
    ws.gpu.streams[0] = 0
    assert ws.address(KIB) == pooled
    # What a graph was captured with stays its own after the capture.
    ws.gpu.captures = set()
    ws.gpu.streams[0] = 5
    assert not any(lies_in(ws.take(KIB), x) for x in captured)


def test_a_request_above_the_bound_goes_past_the_pool():
    ws = Workspace(KIB)
    ws.take(KIB)
    ws.take(KIB + 4)
    assert ws.stats == Stats(bytes_held=KIB, buffers=1, pools=1, misses=1, bypasses=1)


def test_least_recently_used_buffers_go_first():
    ws = Workspace(3 * KIB)
    for role in "abc":
        ws.take(KIB, role)
    ws.take(KIB, "a")
    ws.take(KIB, "d")
    assert ws.stats == Stats(bytes_held=3 * KIB, buffers=3, pools=1, hits=1, misses=4, evictions=1)
    for role in "acd":
        ws.take(KIB, role)
    assert ws.stats.hits == 4
    ws.take(KIB, "b")
    assert ws.stats.misses == 5


def test_the_bound_holds_whatever_is_taken():
    ws = Workspace(10 * KIB)
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        nbytes = 4 * int(torch.randint(1, 3 * KIB, (1,), generator=generator))
        role = "abcdefg"[int(torch.randint(7, (1,), generator=generator))]
        ws.take(nbytes, role)
        stats = ws.stats
        assert 0 < stats.bytes_held <= 10 * KIB
    assert stats.hits > 0
    assert stats.evictions > 0
    assert stats.bypasses > 0


def test_an_evicted_tensor_stays_valid_and_its_memory_is_not_reused():
    ws = Workspace(KIB)
    held = ws.take(KIB, "a").fill_(5)
    other = ws.take(KIB, "b").fill_(6)
    again = ws.take(KIB, "a").fill_(7)
    assert (held == 5).all()
    assert (other == 6).all()
    assert (again == 7).all()


def test_lowering_the_bound_shrinks_every_pool_and_zero_empties_them():
    ws = Workspace(4 * KIB)
    for stream in (0, 1):
        ws.gpu.streams[0] = stream
        for role in "abcd":
            ws.take(KIB, role)
    assert ws.stats.bytes_held == 8 * KIB
    ws.bound = 2 * KIB
    ws.take(KIB, "d")
    assert ws.stats.bytes_held == 4 * KIB
    ws.bound = 0
    ws.take(KIB, "d")
    assert ws.stats.bytes_held == 0
    assert ws.stats.pools == 0


def test_release_returns_the_bytes_held_and_leaves_tensors_alone():
    ws = Workspace(8 * KIB)
    held = ws.take(KIB, "a").fill_(3)
    ws.take(2 * KIB + 4, "b")
    assert ws.pools.release() == 3 * KIB + 4
    assert ws.stats.bytes_held == 0
    assert ws.pools.release() == 0
    assert not lies_in(ws.take(KIB, "a").fill_(4), held)
    assert (held == 3).all()


def test_memory_is_freed_by_release():
    ws = Workspace(KIB)
    ws.take(KIB)
    memory = memory_of_the_only_buffer(ws)
    assert not memory.expired()
    ws.pools.release()
    assert memory.expired()


def test_without_a_count_of_holders_the_pool_stays_empty(caplog):
    ws = Workspace(KIB)
    ws.gpu.says_holders = False
    tensors = [ws.take(KIB) for _ in range(3)]
    assert len({x.data_ptr() for x in tensors}) == 3
    assert ws.stats.bytes_held == 0
    assert [record.name for record in caplog.records] == ["cake"]


def test_tensors_without_memory_are_not_pooled():
    pools = Pools(_TorchDevices(), lambda: KIB)
    assert pools.take("toy", "a", (4,), torch.float32, "meta").is_meta
    assert pools.stats().bytes_held == 0
    with torch._subclasses.FakeTensorMode():
        fake = pools.take("toy", "a", (4,), torch.float32, "cpu")
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert pools.stats().bytes_held == 0


def test_cpu_memory_is_pooled_too():
    pools = Pools(_TorchDevices(), lambda: KIB)
    addresses = {pools.take("toy", "a", (4,), torch.float32, "cpu").data_ptr() for _ in range(3)}
    assert len(addresses) == 1
    assert pools.stats() == Stats(bytes_held=16, buffers=1, pools=1, hits=2, misses=1)


def test_threads_on_one_stream_never_hold_the_same_memory():
    ws = Workspace(64 * KIB)
    threads, rounds = 8, 300
    barrier = threading.Barrier(threads)

    def work(mark):
        barrier.wait(30)
        for _ in range(rounds):
            x = ws.take(KIB, "shared")
            x.fill_(mark)
            y = ws.take(KIB, "shared")
            y.fill_(-mark)
            if not ((x == mark).all() and (y == -mark).all()):
                return False
            del x, y
        return True

    with ThreadPoolExecutor(threads) as executor:
        assert all(executor.map(work, range(1, threads + 1)))
    stats = ws.stats
    assert stats.hits + stats.misses + stats.busy == 2 * threads * rounds
    assert stats.hits > 0
    assert stats.buffers == 1


def test_take_release_and_stats_from_many_threads():
    ws = Workspace(4 * KIB)
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            nbytes = 4 * int(torch.randint(1, KIB, (1,), generator=generator))
            x = ws.take(nbytes, "ab"[seed % 2]).fill_(seed)
            if ws.stats.bytes_held > 4 * KIB or not (x == seed).all():
                failures.append(seed)
            if nbytes % 64 == 0:
                ws.pools.release()

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(work, range(6)))
    assert failures == []


def test_a_used_buffer_can_be_poisoned():
    ws = Workspace(KIB)
    seen = []
    ws.pools.on_reuse = lambda x: seen.append(tuple(x.shape))
    ws.take(KIB)
    ws.take(8)
    assert seen == [(2,)]


@pytest.fixture
def process_pool():
    workspace.release()
    with config.temporary(cake_workspace_pool_bytes=KIB):
        yield workspace
    workspace.release()


def test_the_bound_is_the_configured_one(process_pool):
    for _ in range(2):
        workspace.take("toy", "a", (16,), torch.float32, "cpu")
    assert workspace.stats().bytes_held == 64
    with config.temporary():
        workspace.take("toy", "a", (16,), torch.float32, "cpu")
        assert workspace.stats().bytes_held == 0


def test_hooks_release_empties_the_pools(process_pool):
    workspace.take("toy", "a", (16,), torch.float32, "cpu")
    hooks.release()
    assert workspace.stats().bytes_held == 0


def test_poisoned_empty_reaches_the_process_pool(process_pool):
    workspace.take("toy", "a", (16,), torch.float32, "cpu").fill_(1.0)
    with poisoned_empty():
        assert workspace.take("toy", "a", (16,), torch.float32, "cpu").isnan().all()
        assert workspace.take("toy", "b", (16,), torch.bfloat16, "cpu").isnan().all()
    assert not workspace.take("toy", "a", (16,), torch.float32, "cpu").fill_(1.0).isnan().any()
    assert workspace.take("toy", "a", (16,), torch.float32, "cpu").eq(1.0).all()
    assert workspace.stats().bytes_held == 96
    assert workspace.release() == 96
