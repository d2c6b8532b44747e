"""What a forward keeps is what docs/memory.md says, to the byte; steps of new lengths leave nothing."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from cake.core import no_build, tables

NAMES = ("q", "k", "v", "g", "beta")


def kept_bytes(op: Any, case: Any, **arguments: Any) -> int:
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
        results = op.chunk(**inputs, cu_seqlens_cpu=case.boundaries, **arguments)
    del results
    return sum(kept.values())


def formula(name: str, lengths: tuple[int, ...], heads: tuple[int, int], state: bool) -> dict[str, int]:
    """Bytes, by what is kept."""
    (h, hv), tokens = heads, sum(lengths)
    chunks = [-(-length // 64) for length in lengths]
    states = hv * 32768 * (sum(chunks) if state else sum(max(count - 1, 0) for count in chunks))
    if name == "gdn":
        return {"inputs": 0, "states": hv * (128 * tokens + 4 * tokens) + h * 4 * tokens + states}
    everything = hv * (1024 * tokens + 512 * sum(chunks)) + h * 8 * tokens
    return {"inputs": 0, "states": states, "all": states + everything}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("heads", [(1, 2), (2, 2)])
@pytest.mark.parametrize("lengths", [(64,), (100, 0, 1, 63), (300, 129)], ids=str)
def test_a_forward_keeps_what_the_formula_says(
    op: Any, make: Any, device: torch.device, lengths: tuple[int, ...], heads: tuple[int, int], state: bool
) -> None:
    case = make(lengths, heads, state=state)
    expected = formula(op.name, lengths, heads, state)
    assert expected.keys() == op.own.TAPES.keys()
    if device.type == "cuda":
        expected.pop("all", None)  # kernels keep whole chunks
    assert {what: kept_bytes(op, case, **op.own.TAPES[what]) for what in expected} == expected


def test_a_call_that_is_cut_keeps_the_maps_too(op: Any, make: Any) -> None:
    case = make((300,), (1, 2), state=False)
    segments = 2
    # The second segment has a state of its own to start from.
    expected = formula(op.name, (300,), (1, 2), False)["states"] + 2 * 32768 + 2 * 65540 * segments
    assert kept_bytes(op, case, segments=segments) == expected
    assert kept_bytes(op, case, segments=segments, recompute_state=True) == 0


def test_the_tape_of_many_short_sequences_is_linear_in_tokens(
    op: Any, make: Any, device: torch.device
) -> None:
    case = make([2] * 500, heads=(1, 1), state=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        o, _ = op.chunk(
            *(getattr(case, name).requires_grad_() for name in NAMES), cu_seqlens_cpu=case.boundaries
        )
    assert o.requires_grad
    # On a GPU the tables too, 36 bytes for each sequence and its chunk.
    if op.name == "gdn":
        # Per token: three bf16 rows of 128, beta, a row of T, b, two norms; no state at all.
        assert sum(saved) <= 1000 * (3 * 256 + 4 + 128 + 4 + 8) + 500 * 40 + 64
    else:
        # The inputs alone: per token three bf16 rows of 128, an fp32 one, beta; no state at all.
        tables_of_call = 4 * (4 + 9 * 500) if device.type == "cuda" else 0
        assert sum(saved) == 1000 * (3 * 256 + 512 + 4) + tables_of_call


@pytest.mark.parametrize("op", ["gdn"], indirect=True)
def test_the_tape_of_a_long_call_of_gdn(op: Any, make: Any, device: torch.device) -> None:
    # Boundary states: one bf16 state for each 64 tokens and v head, less one without an initial state.
    case = make((1000,), heads=(1, 2), state=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        op.chunk(*(getattr(case, name).requires_grad_() for name in NAMES), segments=1)
    # A GPU's tape is one tensor: the states and what prep made.
    tape = 15 * 2 * 32768 + 2 * 1000 * 132 + 1000 * 4
    assert ((tape,) if device.type == "cuda" else (15, 2, 128, 128)) in saved


@pytest.mark.parametrize(
    ("op", "kept", "per_chunk"),
    [("kda", "inputs", 0), ("kda", "states", 32768), ("kda", "all", 98816)],
    indirect=["op"],
)
def test_the_tape_of_a_long_call_of_kda(
    op: Any, make: Any, device: torch.device, kept: str, per_chunk: int
) -> None:
    # What README says beside the inputs: 512 and 1544 bytes for each token and v head. The norms are 8
    # more per token and head. Beside a tape a GPU keeps the tables of the sequence and of 16 chunks.
    case = make((1024,), heads=(1, 2))
    leaves = {name: getattr(case, name).requires_grad_() for name in NAMES}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        op.chunk(**leaves, initial_state=case.initial_state, **op.own.TAPES[kept])
    inputs = {x.data_ptr() for x in (*leaves.values(), case.initial_state)}
    beside = sum(x.nbytes for x in saved if x.data_ptr() not in inputs)
    norms = 8 * 1024 if kept == "all" else 0
    tables_of_call = 4 * (4 + 5 + 4 * 16) if device.type == "cuda" and kept != "inputs" else 0
    assert beside == 16 * 2 * per_chunk + norms + tables_of_call


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gdn"], indirect=True)
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
def test_steps_of_new_lengths_compile_nothing_wait_for_nothing_and_leave_nothing(op: Any, make: Any) -> None:
    random = torch.Generator().manual_seed(0)

    def step(count: int) -> None:
        lengths = torch.randint(1, 400, (count,), generator=random).tolist()
        case = make(lengths, (1, 2), state=False)
        inputs = [getattr(case, name).requires_grad_() for name in NAMES]
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, _ = op.chunk(*inputs, cu_seqlens_cpu=case.boundaries)
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
