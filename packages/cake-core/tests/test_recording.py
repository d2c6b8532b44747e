"""Stages that are recorded: what a recording hands to the library, and what it allocates."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from cake.core import config, recording, workspace
from cake.core.recording import address, empty, launch, record, scratch
from cake.core.sequences import packed
from cake.core.tables import plan_tables
from cake.core.testing import poisoned_empty

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


class Library:
    """Keeps what a recording is made of, and plays nothing but the arguments that it is given."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.played: list[tuple[Any, ...]] = []

    def walk(self, *arguments: Any) -> None:
        self.played.append(arguments)

    def op_recording(self, *made: Any) -> Any:
        self.made.append(made)
        return lambda *arguments: self.played.append(arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(recording, "stream_of", lambda device: 7)
    return Library()


def stage(library: Library, x: Any, state: Any = None) -> tuple[Any, Any, Any]:
    """A result, what a tape keeps, and scratch."""
    n = x.shape[1]
    o, kept = empty(x.shape, x.dtype, x.device), empty((2, n), FP32, x.device)
    spare = scratch("op", "spare", (n, 3), BF16, x.device)
    state = None if state is None else state.contiguous()
    launch(library, "walk", x.device, x, state, n, 0.5, True, o, kept, spare)
    return o, kept, spare


def recorded(library: Library, **given: Any) -> recording.Recording:
    def run(x: Any, state: Any) -> Any:
        o, kept, _ = stage(library, x, state)
        return (o, None), (kept,)

    return record(library, "op", "forward", CPU, {"x": None, "state": None, **given}, run)


def test_as_they_are_stages_allocate_and_launch(library: Library) -> None:
    x = torch.zeros(3, 5)
    o, kept, spare = stage(library, x)
    assert library.played == [(x, None, 5, 0.5, True, o, kept, spare, 7)]
    assert (o.shape, kept.shape, spare.shape) == ((3, 5), (2, 5), (5, 3))
    assert not library.made


def test_recorded_nothing_is_launched(library: Library) -> None:
    recorded(library, x=torch.zeros(3, 5))
    assert not library.played
    ((device, index, arguments, views, calls),) = library.made
    assert (device, index) == (1, 0)
    # x, no state, the result, no second one, tape, scratch, stream.
    assert arguments == [("x", False, 2, 32, 3, 5), (), (), (), (), (), ()]
    assert views == [(4, 0, 2, 32, 2, 5), (5, 0, 4, 16, 5, 3)]
    ((entry, *operands),) = calls
    assert entry == library.walk
    x, o, kept, spare, stream = (
        [("argument", i) for i in (0, 2)] + [("view", i) for i in (0, 1)] + [("argument", 6)]
    )
    assert operands == [x, None, 5, 0.5, True, o, kept, spare, stream]


def test_played_it_allocates_once_for_each_purpose(library: Library) -> None:
    made = recorded(library, x=torch.zeros(3, 5))
    x = torch.ones(3, 5)
    with poisoned_empty():
        (o, none), tape = made.play((x, None))
    assert none is None
    assert o.isnan().all()
    assert (o.shape, o.dtype) == ((3, 5), FP32)
    assert tape.view(FP32).isnan().all()
    ((*given, scratch_bytes, stream),) = library.played
    assert [id(a) for a in given] == [id(a) for a in (x, None, o, None, tape)]
    assert (scratch_bytes.shape, stream) == ((30,), 7)
    assert (tape.shape, tape.dtype) == ((40,), torch.uint8)


def test_what_a_stage_wants_contiguous_is_made_so(library: Library) -> None:
    made = recorded(library, x=torch.zeros(3, 5), state=torch.zeros(2, 4).T)
    state = torch.arange(8.0).view(2, 4).T
    made.play((torch.zeros(5, 3).T, state))
    x, got, *_ = library.played[0]
    assert not x.is_contiguous()
    assert got.is_contiguous()
    assert torch.equal(got, state)


def test_a_tape_opens_into_the_pieces_that_it_was_made_of(library: Library) -> None:
    forward = recorded(library, x=torch.zeros(3, 5))

    def run(x: Any, pieces: Any) -> Any:
        (kept,) = pieces
        assert kept.shape == (2, 5)
        launch(library, "walk", CPU, kept)
        return (None,), ()

    given = {"x": torch.zeros(3, 5), "tape": torch.zeros(40, dtype=torch.uint8)}
    record(library, "op", "backward", CPU, given, run, rows=("x",), tape_of=forward, whose="the saved ")
    _, _, arguments, views, calls = library.made[1]
    assert arguments[:2] == [("the saved x", True, 2, 32, 3, 5), ("the saved tape", False, 1, 8, 40)]
    assert views == [(1, 0, 2, 32, 2, 5)]
    assert calls[0][1] == ("view", 0)


def test_pieces_lie_without_gaps_and_aligned(library: Library) -> None:
    sizes = [(3,), (128, 2), (5, 64), (7,), (0, 4)]

    def run(x: Any) -> Any:
        return (), [empty(size, FP32, CPU) for size in sizes]

    made = record(library, "op", "forward", CPU, {"x": torch.zeros(1)}, run)
    nbytes = [4 * torch.Size(size).numel() for size in sizes]
    assert made.tape_bytes == sum(nbytes)
    spans = sorted(
        (piece.first, piece.first + size) for piece, size in zip(made.tape, nbytes, strict=True) if size
    )
    assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
    for piece, size in zip(made.tape, nbytes, strict=True):
        alignment = next(a for a in (512, 256, 128, 64, 32, 16, 8, 4) if size % a == 0)
        assert piece.first % alignment == 0


@pytest.mark.parametrize("one", [True, False], ids=["one result", "none"])
def test_what_needs_one_result_may_go_first(library: Library, one: bool) -> None:
    def run(x: Any) -> Any:
        spare, o = scratch("op", "spare", (2,), FP32, CPU), empty((3,), FP32, CPU)
        y, z = empty((4,), BF16, CPU), empty((5,), FP32, CPU)
        launch(library, "walk", CPU, x, spare)
        launch(library, "walk", CPU, spare, o if one else x)
        launch(library, "walk", CPU, spare, o, y)
        launch(library, "walk", CPU, z)
        return (None, o, y, z), ()

    made = record(library, "op", "backward", CPU, {"x": torch.zeros(1)}, run, early=True)
    (_, _, checked, _, first), (_, _, unchecked, _, second) = library.made
    assert [len(first), len(second)] == [2, 2]
    assert checked[0] == ("x", False, 2, 32, 1)
    assert unchecked[0] == ()
    x = torch.ones(1)
    (none, *results), _ = made.play((x,))
    assert none is None
    assert [y.shape for y in results] == [(3,), (4,), (5,)]
    (x0, _, o0, y0, z0, _, scratch0, _), (x1, _, *late, _, scratch1, _) = library.played
    assert x0 is x1 is x
    assert o0 is (results[0] if one else None)
    assert y0 is z0 is None
    assert all(a is b for a, b in zip(late, results, strict=True))
    assert scratch0 is scratch1
    library.made.clear()
    record(library, "op", "backward", CPU, {"x": x}, run)
    assert len(library.made) == 1


def test_where_the_first_launch_needs_more_there_is_one_part(library: Library) -> None:
    def run(x: Any) -> Any:
        o, y = empty((3,), FP32, CPU), empty((3,), FP32, CPU)
        launch(library, "walk", CPU, x, o.reshape(1, 3), y)
        launch(library, "walk", CPU, o, y)
        return (o, y), ()

    record(library, "op", "backward", CPU, {"x": torch.zeros(1)}, run, early=True)
    ((_, _, _, _, calls),) = library.made
    assert len(calls) == 2


def test_another_shape_lies_where_its_base_does(library: Library) -> None:
    def run(x: Any) -> Any:
        o = empty((3, 2), FP32, CPU)
        launch(library, "walk", CPU, x.reshape(2, 2), o, o.reshape(6))
        assert x.reshape(4) is x
        return (o.reshape(6),), ()

    made = record(library, "op", "forward", CPU, {"x": torch.zeros(4)}, run)
    ((_, _, _, views, calls),) = library.made
    assert views == [(1, 0, 2, 32, 3, 2), (0, 0, 2, 32, 2, 2), (1, 0, 2, 32, 6)]
    assert calls[0][1:] == (("view", 1), ("view", 0), ("view", 2), ("argument", 4))
    (o,), _ = made.play((torch.zeros(8)[::2],))
    assert o.shape == (6,)
    assert library.played[0][0].is_contiguous()


def test_scratch_is_the_workspaces(library: Library) -> None:
    made = recorded(library, x=torch.zeros(3, 5))
    with config.temporary(cake_workspace_pool_bytes=1 << 20):
        before = workspace.stats()
        made.play((torch.zeros(3, 5), None))
        library.played.clear()
        made.play((torch.zeros(3, 5), None))
        now = workspace.stats()
        assert (now.misses - before.misses, now.hits - before.hits) == (1, 1)
        assert now.bytes_held == 30
        library.played.clear()
        workspace.release()


def test_tables_are_the_calls_own(library: Library) -> None:
    def run(plan: Any) -> Any:
        assert plan_tables(packed((0, 3), 3), CPU, lambda: pytest.fail("made")) is plan
        return (), ()

    record(library, "op", "forward", CPU, {"plan": torch.zeros(9, dtype=torch.int32)}, run)


def test_host_tables_are_held(library: Library) -> None:
    values = array("i", [1, 2])

    def run(x: Any) -> Any:
        launch(library, "walk", CPU, address(values))
        return (), ()

    made = record(library, "op", "forward", CPU, {"x": torch.zeros(1)}, run)
    assert made.held == (values,)
    assert library.made[0][-1][0][1] == values.buffer_info()[0]


def test_a_stage_that_fails_leaves_no_recording_open(library: Library) -> None:
    def run(x: Any) -> Any:
        raise KeyError("wrong")

    with pytest.raises(KeyError):
        record(library, "op", "forward", CPU, {"x": torch.zeros(1)}, run)
    assert isinstance(empty((2,), FP32, CPU), torch.Tensor)
