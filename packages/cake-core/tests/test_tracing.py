"""What tracers are told about a call's sequences, and what they keep of the configuration."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cake.core import config, sequences, tracing


def test_only_tracers_and_dispatch_modes_trace() -> None:
    assert not tracing.traced()
    with FakeTensorMode():
        assert tracing.traced()
    seen: list[bool] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(tracing.traced())
        return x if tracing.traced() else x + 1

    x = torch.zeros(1)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(x), x)
    assert torch.equal(step(x), x + 1)
    assert seen[-1] is False


@pytest.mark.parametrize("lengths", [(0,), (1,), (64,), (63, 0, 65), (128, 1, 300)])
def test_room_is_enough_and_never_one(lengths: tuple[int, ...]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    tokens = sum(lengths)
    real = tracing.with_room(sequences.packed(bounds.tolist(), tokens))
    fake = tracing.fake_sequences(1, tokens, bounds, None)
    assert (real.n, real.total) == (fake.n, fake.total) == (len(lengths), tokens)
    assert tracing.fake_sequences(1, tokens, None, bounds.tolist()).n == fake.n
    for edge in (False, True):
        assert real.slots(edge) == fake.slots(edge) >= max(2, len(real.chunks))
    assert real.chunks == sequences.packed(bounds.tolist(), tokens).chunks


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 64), (2, 130), (1, 0)])
def test_room_of_a_batch(batch: int, tokens: int) -> None:
    real = tracing.with_room(sequences.batched(batch, tokens))
    fake = tracing.fake_sequences(batch, tokens, None, None)
    assert (real.n, real.total) == (fake.n, fake.total)
    assert real.slots(True) == fake.slots(True) >= max(2, len(real.chunks))


def test_packed_sequences_have_one_row() -> None:
    with pytest.raises(ValueError, match=r"q must be \[1, T, H, 128\] with cu_seqlens, got B=2"):
        tracing.fake_sequences(2, 10, torch.tensor([0, 10]), None)


def test_boundaries_become_a_tensor_or_a_list() -> None:
    cu = torch.tensor([0, 3])
    assert tracing.host_boundaries(None, None) == (None, None)
    assert tracing.host_boundaries(cu, None)[0] is cu
    assert tracing.host_boundaries(cu, (0, 3)) == (None, [0, 3])
    assert tracing.host_boundaries(None, cu)[0] is cu
    with pytest.raises(TypeError, match="cu_seqlens_cpu must be a CPU tensor or a list of ints, got str"):
        tracing.host_boundaries(None, "03")
    with pytest.raises(ValueError, match="cu_seqlens_cpu must be on the CPU, got meta"):
        tracing.host_boundaries(None, cu.to("meta"))
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[N \+ 1\]"):
        tracing.host_boundaries(cu[:1], None)


def test_the_stamp_changes_with_what_calls_run() -> None:
    config.reset()
    stamps = [config.stamp]
    for deterministic in (False, True, False):
        config.configure(deterministic_mode=deterministic)
        stamps.append(config.stamp)
    config.reset()
    assert stamps[0] == config.stamp == ""
    assert stamps[1] == stamps[3]
    assert len(set(stamps)) == 3


def test_the_mark_is_the_one_that_torch_sets() -> None:
    def marked() -> None:
        pass

    torch.compiler.assume_constant_result(marked)
    assert vars(marked) == vars(tracing._read)


def test_importing_it_leaves_the_compiler_alone() -> None:
    code = "import sys, cake.core.tracing; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
