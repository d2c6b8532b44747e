"""What det promises: the same bits in every call, process, thread and stream, whatever pool and tape."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cake.core import config, workspace
from cake.core.testing import assert_bitwise_equal, poisoned_empty

SHAPES = [((130, 1, 0, 200), (1, 2)), ((64, 64), (2, 4)), ((33,), (3, 3))]


def zero_at_chunk_ends(case):
    """No decay at each chunk's last token, where a racing sum over a chunk would show first."""
    g = case.g.clone()
    for start, end in zip(case.boundaries, case.boundaries[1:], strict=False):
        g[:, start:end][:, 63::64] = 0
    return case.replace(g=g)


@pytest.mark.parametrize("gate", ["ordinary", "zero at chunk ends"])
def test_repeats(op, make, call, assert_same_bits, device, gate):
    gpu = device.type == "cuda"
    many = (16, 48) if op.name == "gdn" else (8, 8)
    case = make((4096,) if gpu else (200, 130), heads=many if gpu else (1, 3))
    case = case if gate == "ordinary" else zero_at_chunk_ends(case)
    first = call(case)
    for _ in range(50 if gpu else 5):
        # What uninitialised memory holds must not matter: poison it, then let it hold old results.
        with poisoned_empty():
            assert_same_bits(call(case), first)
    assert_same_bits(call(case), first)


@pytest.mark.parametrize(("lengths", "heads"), SHAPES, ids=str)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
def test_whatever_is_kept(op, make, call, assert_same_bits, lengths, heads, state):
    case = make(lengths, heads=heads, state=state)
    saved = call(case, recompute_state=False)
    for tape in op.own.TAPES.values():
        with poisoned_empty():
            assert_same_bits(call(case, **tape), saved)


def test_with_a_pool(make, call, assert_same_bits, tape):
    cases = [make(lengths, heads=heads, seed=i) for i, (lengths, heads) in enumerate(SHAPES)]
    without = [call(case, **tape) for case in cases]
    hits = workspace.stats().hits
    with config.temporary(cake_workspace_pool_bytes=1 << 30):
        for _ in range(2):
            for case, expected in zip(cases, without, strict=True):
                with poisoned_empty():
                    assert_same_bits(call(case, **tape), expected)
        assert workspace.stats().hits > hits
        assert workspace.release() > 0


def test_with_a_pool_and_two_live_graphs(op, make):
    # The second forward must not take over what the first one's backward still needs.
    cases = [make((130,), seed=i) for i in range(2)]

    def forward(case):
        inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
        return inputs, op.chunk(*inputs, case.g, case.beta)[0]

    expected = [torch.autograd.grad(o, inputs, case.do) for case in cases for inputs, o in [forward(case)]]
    with config.temporary(cake_workspace_pool_bytes=1 << 30):
        for case in cases:  # fills the pool
            inputs, o = forward(case)
            torch.autograd.grad(o, inputs, case.do)
            del inputs, o
        graphs = [forward(case) for case in cases]
        for case, (inputs, o), want in zip(cases, graphs, expected, strict=True):
            for name, a, b in zip(
                ("dq", "dk", "dv"), torch.autograd.grad(o, inputs, case.do), want, strict=True
            ):
                assert_bitwise_equal(name, a, b)


def test_threads(op, make, call, assert_same_bits):
    cases = [make((130, 65), seed=i) for i in range(4)]
    expected = [call(case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(call, cases * 2), expected * 2, strict=True):
            assert_same_bits(got, want)


PROCESS = """
import hashlib, sys, torch
from cake.core import entry
device, op, name = sys.argv[1:]
random = torch.Generator().manual_seed(5)
draw = lambda *shape: torch.randn(shape, generator=random)
q, k, v = (draw(1, 135, h, 128).bfloat16().to(device).requires_grad_() for h in (2, 2, 4))
g = draw(1, 135, 4) if op == "gdn" else draw(1, 135, 4, 128)
g, beta = (-g.abs()).to(device).requires_grad_(), draw(1, 135, 4).sigmoid().to(device)
o, final = entry(op, name)(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
                           cu_seqlens_cpu=[0, 70, 135])
(o.float().square().sum() + final.square().sum()).backward()
digest = hashlib.sha256()
for x in (o, final, q.grad, k.grad, v.grad, g.grad):
    digest.update(bytes(x.detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
print(digest.hexdigest())
"""


def test_processes(op, device):
    command = [sys.executable, "-c", PROCESS, str(device), op.name, op.chunk.__name__]
    digests = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(digests) == 1
    assert len(digests.pop().strip()) == hashlib.sha256().digest_size * 2


@pytest.mark.parametrize("variant", ["det", "fast"])
def test_variants(make, call, assert_accurate, variant):
    case = make((130, 65))
    assert_accurate(case, call(case, variant=variant))


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_inside(make, call, device, assert_same_bits, autocast):
    case = make((70, 65), heads=(1, 2))
    expected = call(case)
    with torch.autocast(device.type, dtype=autocast):
        got = call(case)
    assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
class TestStreams:
    def test_a_side_stream(self, make, call, assert_same_bits, device):
        # The inputs are filled behind a long wait on the side stream: a kernel on another stream reads zeros.
        case = make((130, 65), heads=(2, 4))
        expected = call(case)
        side = torch.cuda.Stream(device)
        for i in range(20):
            late = case.map(torch.zeros_like)
            torch.cuda.synchronize()
            if i % 2:
                for name, x in {**late.tensors(), "do": late.do, "dht": late.dht}.items():
                    x.copy_(getattr(case, name))
                got = call(late)
            else:
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    for name, x in {**late.tensors(), "do": late.do, "dht": late.dht}.items():
                        x.copy_(getattr(case, name))
                    got = call(late)
            torch.cuda.synchronize()
            assert_same_bits(got, expected)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_another_gpu(self, make, call, assert_same_bits, device):
        # The current device stays the first one; the same architecture gives the same bits.
        case = make((130, 65), heads=(2, 4))
        there = case.map(lambda x: x.to("cuda:1"))
        assert_same_bits(call(there), call(case))
        assert torch.cuda.current_device() == 0

    def test_under_load(self, make, call, assert_same_bits, device):
        case = make((4096,), heads=(4, 12))
        expected = call(case)
        other, noise = torch.cuda.Stream(device), torch.randn(4096, 4096, device=device)
        for _ in range(10):
            with torch.cuda.stream(other):
                for _ in range(10):
                    noise @ noise
            assert_same_bits(call(case), expected)
        torch.cuda.synchronize()

    def test_nothing_is_read_back(self, make, call, device):
        case = make((130, 65), heads=(2, 4))
        cu = torch.tensor(case.boundaries, device=device)
        call(case)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(case)
            call(case, cu_seqlens=cu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
