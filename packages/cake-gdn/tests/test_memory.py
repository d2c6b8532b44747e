"""What a forward keeps is what docs/memory.md says, to the byte; steps of new lengths leave nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from cake.core import no_build, tables
from cake.gdn import chunk_gated_delta_rule

NAMES = ("q", "k", "v", "g", "beta")


def kept_bytes(case: Any, **arguments: Any) -> int:
    """Bytes that a forward saves for its backward besides its inputs, tables of a GPU's kernels left out."""
    inputs = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    given = {x.untyped_storage().data_ptr() for x in inputs.values()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        table = x.device.type == "cuda" and x.dtype == torch.int32 and x.dim() == 1
        if x.untyped_storage().data_ptr() not in given and not table:
            kept[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = chunk_gated_delta_rule(**inputs, cu_seqlens_cpu=case.boundaries, **arguments)
    del results
    return sum(kept.values())


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("heads", [(1, 2), (2, 2)])
@pytest.mark.parametrize("lengths", [(64,), (100, 0, 1, 63), (300, 129)], ids=str)
def test_a_forward_keeps_what_the_formula_says(
    make: Any, lengths: tuple[int, ...], heads: tuple[int, int], state: bool
) -> None:
    case = make(lengths, heads, state=state)
    h, hv = heads
    tokens = sum(lengths)
    chunks = [-(-length // 64) for length in lengths]
    states = sum(chunks) if state else sum(max(count - 1, 0) for count in chunks)
    assert kept_bytes(case) == hv * (128 * tokens + 4 * tokens) + h * 4 * tokens + hv * 32768 * states
    assert kept_bytes(case, recompute_state=True) == 0


def test_a_call_that_is_cut_keeps_the_maps_too(make: Any) -> None:
    case = make((300,), (1, 2), state=False)
    states, segments = 5, 2
    expected = 2 * 132 * 300 + 4 * 300 + 2 * 32768 * states + 2 * 65540 * segments
    assert kept_bytes(case, segments=segments) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
def test_steps_of_new_lengths_compile_nothing_wait_for_nothing_and_leave_nothing(make: Any) -> None:
    random = torch.Generator().manual_seed(0)

    def step(count: int) -> None:
        lengths = torch.randint(1, 400, (count,), generator=random).tolist()
        case = make(lengths, (1, 2), state=False)
        inputs = [getattr(case, name).requires_grad_() for name in NAMES]
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, _ = chunk_gated_delta_rule(*inputs, cu_seqlens_cpu=case.boundaries)
            torch.autograd.grad(o, inputs, case.do)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    step(3)
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left in cycles would go during the steps
    tables.release()
    before = torch.cuda.memory_allocated()
    with no_build():
        for i in range(100):
            step(1 + i % 7)
    torch.cuda.synchronize()
    tables.release()
    assert torch.cuda.memory_allocated() == before
