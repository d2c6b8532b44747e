"""The tables of a call's sequences and chunks that kernels read, made on the device by one small launch.

Nothing is read back from the device and every launch goes to the given stream, so that a CUDA graph can
capture them. The kernels are an op's own (`plan_host.cuh`).

Tables of boundaries that the host knows say the same whenever they are made, and the layers of a model ask
for the same ones: this module owns the last few of the process, for their stream. `release()` forgets them.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import torch

from cake.core.launch import stream_of
from cake.core.recording import address, call, empty, know, known, recording
from cake.core.segments import CHOSEN_LENGTHS, LENGTHS, Choice, Segments, UnseenSegments
from cake.core.sequences import Sequences

__all__ = ["plan_tables", "plan_words", "release"]

# Kinds of boundaries as `make_plan` numbers them, and how many fit into one launch's parameters.
UNIFORM, INLINE, INT32, INT64 = range(4)
CUT = 4  # of segments, added
INLINE_BOUNDARIES = 1000
# Added to a boundary where a sequence is cut; `MOST_TOKENS` of a call that is.
INNER_BOUNDARY = MOST_TOKENS = 1 << 30
HEADER = 4
#: Tables that are kept: of the sequences, their segments and both directions' streams of a few packs.
KEPT = 8

#: `make_plan`, `copy_boundaries` and `make_cut_plan` of plan_host.cuh, and of a library that has it
#: `make_chosen_plan`.
Entries = Sequence[Callable[..., Any]]

_kept: OrderedDict[tuple[Sequences, torch.device, int], torch.Tensor] = OrderedDict()
# The one asked for last, which the other layers of a model ask for next: found without the lock.
_last: dict[tuple[Sequences, torch.device, int], torch.Tensor] = {}
_lock = threading.Lock()


def plan_words(seqs: Sequences) -> int:
    """int32 words of the tables of a call."""
    words = HEADER + (6 if isinstance(seqs, Segments) else 5) * seqs.n + 4 * seqs.chunk_capacity
    return words + 2 * (seqs.whole.n + 1) if isinstance(seqs, UnseenSegments) else words


def plan_tables(
    seqs: Sequences,
    device: torch.device,
    entries: Callable[[], Entries],
) -> torch.Tensor:
    """int32: what `Plan` in seq.cuh reads. Not to be written to: another call may be given the same tensor.

    Args:
        seqs: the call's sequences.
        device: where the call runs.
        entries: gives the host entries of the op's library.

    Raises:
        ValueError: segments of a call with 2^30 tokens or more.
    """
    if recording():
        if known("plan") is None:
            know("plan", _made(seqs, device, entries(), known("cu_seqlens")))
        given: torch.Tensor = known("plan")
        return given
    # A graph that is replayed must own what it reads.
    if seqs.boundaries is None or _capturing(device):
        return _made(seqs, device, entries(), seqs.cu_device)
    key = (seqs, device, stream_of(device))
    found = _last.get(key)
    if found is not None:
        return found
    with _lock:
        found = _kept.get(key)
        if found is None:
            found = _kept[key] = _made(seqs, device, entries(), None)
            if len(_kept) > KEPT:
                _kept.popitem(last=False)
        else:
            _kept.move_to_end(key)
        _last.clear()
        _last[key] = found
    return found


def release() -> None:
    """Forget the tables that are kept; calls that still hold one keep it."""
    with _lock:
        _kept.clear()
        _last.clear()


def _capturing(device: torch.device) -> bool:
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _made(
    seqs: Sequences,
    device: torch.device,
    entries: Entries,
    boundaries: torch.Tensor | None,
) -> torch.Tensor:
    make_plan, copy_boundaries, make_cut_plan, *make_chosen_plan = entries
    cut = isinstance(seqs, Segments)
    if cut and seqs.total >= MOST_TOKENS:
        raise ValueError(f"a call that is cut must have less than 2^30 tokens, got {seqs.total}")
    count = plan_words(seqs)
    # Kernels read four words at once, and inside a tape what isn't a multiple of that may lie anywhere.
    words: torch.Tensor = empty((-(-count // 4) * 4 if recording() else count,), torch.int32, device)
    if isinstance(seqs, UnseenSegments):
        cut_into = boundaries, seqs.n, seqs.whole.n
        around = seqs.chunk_capacity, seqs.total, seqs.tokens
        if seqs.choice is None:
            call(make_cut_plan, device, words, *cut_into, seqs.length, *around)
        else:
            choice = _choice_words(seqs.choice)  # held until the launch has read it
            call(make_chosen_plan[0], device, words, *cut_into, address(choice), *around)
        return words
    kind, host = UNIFORM, 0
    if boundaries is not None:
        kind = INT64 if boundaries.dtype == torch.int64 else INT32
    elif cut or (seqs.batch == 1 and seqs.n > 1):
        # Held until the launches have read it: the cache may drop it for another thread's call.
        values = _host_boundaries(seqs)
        kind, host = INLINE, values.buffer_info()[0]
        if seqs.n + 1 > INLINE_BOUNDARIES:
            boundaries = empty((seqs.n + 1,), torch.int32, device)
            call(copy_boundaries, device, boundaries, host, seqs.n + 1)
            kind = INT32
        kind += CUT if cut else 0
    sizes = seqs.n, seqs.chunk_capacity, seqs.total, seqs.tokens
    call(make_plan, device, words, kind, host, boundaries, *sizes)
    return words


@lru_cache(maxsize=64)
def _choice_words(choice: Choice) -> array[int]:
    """`Choice` of plan.cuh."""
    room = (0,) * (CHOSEN_LENGTHS - len(choice.lengths))
    sizes = len(choice.lengths), 2 * LENGTHS[0], choice.heads, choice.processors
    return array("i", (*sizes, *choice.lengths, *room, *astuple(choice.rates)))


@lru_cache(maxsize=64)
def _host_boundaries(seqs: Sequences) -> array[int]:
    bounds = seqs.host_boundaries()
    if isinstance(seqs, Segments):
        inner = (*seqs.opens, False)
        return array("i", (x + INNER_BOUNDARY * cut for x, cut in zip(bounds, inner, strict=True)))
    return array("i", bounds)
