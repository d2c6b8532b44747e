"""The launches of one direction of a call, recorded once and played again by one call into C++.

A stage of a kernel backend asks for memory (`empty`, `scratch`) and launches kernels (`launch`). Run as it is
it does just that. Run by `record` it works on stand-ins for tensors, which have a shape, a dtype and a device
and no memory: nothing is allocated and nothing launched. What it would have done becomes a `Recording`, which
every call with the same metadata plays: it allocates the results, one tensor for all that a backward needs
(the *tape*) and one for everything else (the *scratch*), and hands them to the kernels in one go.

What a stage does may depend on shapes, dtypes and the options of its call, never on a tensor's address or
values, and it may ask nothing else of a tensor but to be contiguous. The C++ side is an op's own
(`recording_host.cuh`).
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cake.core import loader, workspace
from cake.core.launch import allocator, stream_of

__all__ = [
    "Otherwise",
    "Recording",
    "address",
    "call",
    "empty",
    "know",
    "known",
    "launch",
    "record",
    "recording",
    "scratch",
]

#: Most bytes that a tensor inside another one is aligned to; as PyTorch's allocator.
ALIGNMENT = 512
# DLPack's codes of dtypes, and bits.
_CODES = {
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}
_DEVICES = {"cpu": 1, "cuda": 2}


class Otherwise(RuntimeError):
    """A tensor isn't what a recording was made of; nothing was launched."""


class Extents(NamedTuple):
    """Shape and dtype of a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """A tensor inside another one, `first` bytes from its begin."""

    first: int
    extents: Extents


class StandIn:
    """What `record` hands to stages in place of a tensor."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.dense = False
        #: ("argument", index) or ("view", index), once that is known.
        self.place: tuple[str, int] | None = None
        #: What it is another shape of.
        self.base: StandIn | None = None

    @property
    def extents(self) -> Extents:
        return Extents(self.shape, self.dtype)

    def contiguous(self) -> StandIn:
        """Itself: what stands in its place will be."""
        self.dense = True
        return self

    def reshape(self, *shape: int) -> StandIn:
        """The same memory in another shape, for launches or as a result."""
        self.dense = True
        if shape == self.shape:
            return self
        made = StandIn(shape, self.dtype, self.device)
        made.base = self
        return made


class _Recorder:
    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known
        self.made: list[StandIn] = []
        self.calls: list[tuple[Any, ...]] = []
        self.held: list[Any] = []


class _Active(threading.local):
    recorder: _Recorder | None = None


_active = _Active()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """An uninitialised contiguous tensor: a result, or a part of the tape."""
    recorder = _active.recorder
    if recorder is None:
        return torch.empty(shape, dtype=dtype, device=device)
    made = StandIn(shape, dtype, device)
    recorder.made.append(made)
    return made


def scratch(op: str, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """The same, of the workspace (`cake.core.workspace.take`): what nobody needs after the call."""
    if _active.recorder is None:
        return workspace.take(op, role, shape, dtype, device)
    return empty(shape, dtype, device)


def launch(library: Any, function: str, device: torch.device, *arguments: Any) -> None:
    """Calls a host entry of an op's library on the current stream of `device`, its last argument."""
    call(getattr(library, function), device, *arguments)


def call(entry: Callable[..., Any], device: torch.device, *arguments: Any) -> None:
    """`launch` of a host entry."""
    recorder = _active.recorder
    if recorder is None:
        entry(*arguments, stream_of(device))
    else:
        recorder.calls.append((entry, *arguments))


def address(values: array[int]) -> int:
    """Where a host table lies, for an argument of `launch`. Whoever calls holds it until then."""
    if _active.recorder is not None:
        _active.recorder.held.append(values)
    return values.buffer_info()[0]


def recording() -> bool:
    """Whether this thread records."""
    return _active.recorder is not None


def known(name: str) -> Any:
    """What stands for a tensor that the recorded call was given or knows since; None where nothing does."""
    return None if _active.recorder is None else _active.recorder.known.get(name)


def know(name: str, x: Any) -> None:
    """Lets a stand-in be `known` in the rest of a recording."""
    if _active.recorder is not None:
        _active.recorder.known[name] = x


@dataclass(frozen=True, eq=False)
class Recording:
    """See the module.

    epoch: of the loader (`loader.epoch`) whose library plays it; in another one a call records again.
    given: extents of the tensors that it was made of.
    results: how many.
    casts: results that are wanted in another dtype, and that.
    dense: which of the given tensors the stages want to be contiguous.
    tape: pieces of the tape, as the stages numbered them; None in place of what isn't there.
    tape_bytes, scratch_bytes: None where there is none of it.
    parts: of each part of the launches the results that are allocated before it, as (index, shape, strides,
        dtype), and what plays it.
    """

    epoch: int
    given: tuple[Extents | None, ...]
    op: str
    role: str
    device: torch.device
    results: int
    casts: tuple[tuple[int, torch.dtype], ...]
    dense: tuple[int, ...]
    tape: tuple[Piece | None, ...]
    tape_bytes: int | None
    scratch_bytes: int | None
    parts: tuple[tuple[tuple[Any, ...], Callable[..., Any]], ...]
    held: tuple[Any, ...]

    def play(self, given: tuple[Any, ...]) -> tuple[list[Any], torch.Tensor | None]:
        """Allocates and launches; results, and the tape.

        Args:
            given: the tensors that the recording was made of, or others like them; None in the same places.

        Raises:
            Otherwise: a tensor of another shape, dtype or device, or rows that kernels can't load.
            RuntimeError: a failed launch.
        """
        for i in self.dense:
            if not given[i].is_contiguous():
                given = tuple([x.contiguous() if j in self.dense else x for j, x in enumerate(given)])
                break
        allocate, tape, scratch = allocator(self.device), None, None
        if self.tape_bytes is not None:
            tape = allocate((self.tape_bytes,), (1,), torch.uint8)
        if self.scratch_bytes is not None:
            if workspace.pooled():
                scratch = workspace.take(self.op, self.role, (self.scratch_bytes,), torch.uint8, self.device)
            else:
                scratch = allocate((self.scratch_bytes,), (1,), torch.uint8)
        made: list[Any] = [None] * self.results
        stream = stream_of(self.device)
        for results, entry in self.parts:
            for i, shape, strides, dtype in results:
                made[i] = allocate(shape, strides, dtype)
            wrong = entry(*given, *made, tape, scratch, stream)
            if wrong is not None:
                raise Otherwise(wrong)
        return made, tape


def record(
    library: Any,
    op: str,
    role: str,
    device: torch.device,
    given: dict[str, torch.Tensor | None],
    run: Callable[..., tuple[Sequence[StandIn | None], Sequence[StandIn | None]]],
    *,
    rows: Collection[str] = (),
    tape_of: Recording | None = None,
    dtypes: Sequence[torch.dtype | None] = (),
    early: bool = False,
    whose: str = "",
) -> Recording:
    """Records what `run` does.

    Args:
        library: an op's library that exports `<op>_recording`.
        op: its name.
        role: of the scratch in the workspace.
        device: where the call runs.
        given: the tensors that each call hands in, by the names that errors call them. Tables are made of
            "cu_seqlens", unless "plan" is there (`cake.core.tables`).
        run: runs stages on stand-ins of `given`, in their order, and returns results and what a tape keeps.
            With `tape_of`, "tape" is the tape of that recording, and `run` gets its pieces as a sequence.
        rows: which of `given` kernels load 16 bytes at a time, as `cake.core.launch.is_aligned` has it.
        tape_of: the recording that made that tape.
        dtypes: of the results, as a call wants them.
        early: launch what needs one result at most before the others are allocated: one more call into C++,
            for a GPU that begins sooner.
        whose: what errors say before the name of a tensor.
    """
    epoch = loader.epoch
    stands = [None if x is None else StandIn(x.shape, x.dtype, device) for x in given.values()]
    for i, x in enumerate(stands):
        if x is not None:
            x.place = "argument", i
    views: list[tuple[Any, ...]] = []

    def inside(argument: int, pieces: Iterable[tuple[StandIn, int]]) -> None:
        for x, first in pieces:
            x.place = "view", len(views)
            views.append((argument, first, *_CODES[x.dtype], *x.shape))

    arguments: list[Any] = list(stands)
    if tape_of is not None:
        kept = [None if p is None else StandIn(*p.extents, device) for p in tape_of.tape]
        there = [
            (x, p.first) for x, p in zip(kept, tape_of.tape, strict=True) if x is not None and p is not None
        ]
        place = list(given).index("tape")
        inside(place, there)
        arguments[place] = kept
    assert _active.recorder is None
    recorder = _active.recorder = _Recorder(dict(zip(given, stands, strict=True)))
    try:
        results, keep = run(*arguments)
    finally:
        _active.recorder = None

    n = len(stands)
    for i, x in enumerate(results):
        if x is not None:
            x.place = "argument", n + i
            if x.base is not None:
                inside(n + i, [(x.base, 0)])
    end = n + len(results)
    tape, tape_bytes = _arranged([x for x in keep if x is not None])
    inside(end, tape)
    rest, scratch_bytes = _arranged([x for x in recorder.made if x.place is None])
    inside(end + 1, rest)
    at = {id(x): first for x, first in tape}

    def place_of(x: StandIn) -> tuple[str, int] | None:
        if x.place is None and x.base is not None:
            kind, i = x.base.place or ("", -1)
            argument, first = (i, 0) if kind == "argument" else views[i][:2]
            inside(argument, [(x, first)])
        return x.place

    calls = [
        (entry, *[place_of(x) if isinstance(x, StandIn) else x for x in operands], ("argument", end + 2))
        for entry, *operands in recorder.calls
    ]
    checked = [
        () if x is None else (whose + name, name in rows, *_CODES[x.dtype], *x.shape)
        for name, x in zip(given, stands, strict=True)
    ]
    unchecked = [()] * (len(results) + 3)

    def needed(launches: Iterable[tuple[Any, ...]]) -> set[int]:
        """Which results launches are given."""
        places = [x for launched in launches for x in launched if type(x) is tuple]
        at = {views[i][0] if kind == "view" else i for kind, i in places}
        return at & set(range(n, end))

    first = next((i for i, launched in enumerate(calls) if len(needed([launched])) > 1), 0) if early else 0
    make = getattr(library, f"{op}_recording")
    to_make = {i: x for i, x in enumerate(results) if x is not None}
    soon = {i for i in to_make if first and n + i in needed(calls[:first])}
    parts: list[tuple[tuple[Any, ...], Callable[..., Any]]] = []
    for launches, due in ((calls[:first], soon), (calls[first:], to_make.keys() - soon))[not first :]:
        # What the first part has checked isn't checked again.
        checks = ([()] * n if parts else checked) + unchecked
        made = [
            (i, x.shape, torch.empty(x.shape, device="meta").stride(), x.dtype)
            for i, x in to_make.items()
            if i in due
        ]
        entry = make(_DEVICES[device.type], device.index or 0, checks, views, launches)
        parts.append((tuple(made), entry))

    return Recording(
        epoch=epoch,
        given=tuple(None if x is None else x.extents for x in stands),
        op=op,
        role=role,
        device=device,
        results=len(results),
        casts=tuple(
            (i, dtype)
            for i, (x, dtype) in enumerate(zip(results, dtypes, strict=False))
            if x is not None and dtype is not None and x.dtype is not dtype
        ),
        dense=tuple(i for i, x in enumerate(stands) if x is not None and x.dense),
        tape=tuple(None if x is None else Piece(at[id(x)], x.extents) for x in keep),
        tape_bytes=tape_bytes if tape else None,
        scratch_bytes=scratch_bytes if rest else None,
        parts=tuple(parts),
        held=tuple(recorder.held),
    )


def _arranged(pieces: Sequence[StandIn]) -> tuple[list[tuple[StandIn, int]], int]:
    """First bytes of tensors one behind another, and their bytes, without a gap.

    Those with the largest power of two in their bytes come first, so that each is aligned to its own, or to
    `ALIGNMENT`.
    """
    placed, end = [], 0
    for x in sorted(pieces, key=lambda x: -math.gcd(x.extents.nbytes, ALIGNMENT)):
        placed.append((x, end))
        end += x.extents.nbytes
    return placed, end
