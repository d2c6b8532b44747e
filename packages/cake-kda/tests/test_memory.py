"""What a forward keeps is what docs/memory.md says, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cake.kda import chunk_kda


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
        results = chunk_kda(**inputs, cu_seqlens_cpu=case.boundaries, **arguments)
    del results
    return sum(kept.values())


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("heads", [(1, 2), (2, 2)])
@pytest.mark.parametrize("lengths", [(64,), (100, 0, 1, 63)], ids=str)
def test_a_forward_keeps_what_the_formula_says(
    make: Any, device: torch.device, lengths: tuple[int, ...], heads: tuple[int, int], state: bool
) -> None:
    case = make(lengths, heads, state=state)
    h, hv = heads
    tokens = sum(lengths)
    chunks = [-(-length // 64) for length in lengths]
    states = sum(chunks) if state else sum(max(count - 1, 0) for count in chunks)
    assert kept_bytes(case) == hv * 32768 * states
    assert kept_bytes(case, recompute_state=True) == 0
    if device.type == "cpu":  # kernels keep whole chunks
        everything = hv * (1024 * tokens + 512 * sum(chunks)) + h * 8 * tokens
        assert kept_bytes(case, disable_recompute=True) == hv * 32768 * states + everything


def test_a_call_that_is_cut_keeps_the_maps_too(make: Any) -> None:
    case = make((300,), (1, 2), state=False)
    states, segments = 5, 2
    assert kept_bytes(case, segments=segments) == 2 * 32768 * states + 2 * 65540 * segments
    assert kept_bytes(case, segments=segments, recompute_state=True) == 0
