"""Chunks, slots and boundaries against brute force."""

from __future__ import annotations

import random

import pytest
import torch

from cake.core import sequences


def random_lengths(seed):
    rng = random.Random(seed)
    kind = rng.choice(["short", "long", "zeros", "multiples"])
    n = rng.randint(1, 12)
    draw = {
        "short": lambda: rng.randint(0, 3),
        "long": lambda: rng.randint(0, 700),
        "zeros": lambda: rng.choice([0, 0, rng.randint(0, 200)]),
        "multiples": lambda: 64 * rng.randint(0, 5),
    }[kind]
    return [draw() for _ in range(n)]


def pack(lengths):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return sequences.packed(bounds, bounds[-1])


@pytest.mark.parametrize("seed", range(60))
def test_chunks_cover_every_token_once(seed):
    lengths = random_lengths(seed)
    seqs = pack(lengths)
    owner = [(n, i) for n, length in enumerate(lengths) for i in range(length)]
    seen = []
    for n, c, start, rows in seqs.chunks:
        assert 1 <= rows <= sequences.CHUNK
        assert owner[start] == (n, c * sequences.CHUNK)
        assert owner[start + rows - 1][0] == n
        seen += range(start, start + rows)
    assert seen == list(range(sum(lengths)))
    assert seqs.n == len(lengths)
    assert seqs.total == sum(lengths)
    assert seqs.chunk_capacity == len(seqs.chunks)


@pytest.mark.parametrize("with_edge", [True, False], ids=["edge", "inner"])
@pytest.mark.parametrize("seed", range(60))
def test_slots_are_distinct_and_fill_the_tape(seed, with_edge):
    seqs = pack(random_lengths(seed))
    for find, outermost in (
        (seqs.state_slot, lambda n, c: c == 0),
        (seqs.adjoint_slot, lambda n, c: c == seqs.chunk_counts[n] - 1),
    ):
        slots = []
        for n, c, _, _ in seqs.chunks:
            slot = find(n, c, with_edge=with_edge)
            assert (slot is None) == (not with_edge and outermost(n, c))
            slots += [] if slot is None else [slot]
        assert slots == list(range(seqs.slots(with_edge)))


@pytest.mark.parametrize("seed", range(60))
def test_capacities_of_unread_boundaries_hold_every_pack(seed):
    lengths = random_lengths(seed)
    exact = pack(lengths)
    cu = torch.tensor(exact.boundaries)
    bound = sequences.packed_on_device(cu, exact.total)
    assert bound.boundaries is None
    assert bound.cu_device is cu
    assert bound.n == exact.n
    assert bound.chunk_capacity >= exact.chunk_capacity
    assert bound.boundary_capacity >= exact.boundary_capacity
    # Linear in the tokens: a tape never pays a chunk for each of many short sequences.
    assert bound.boundary_capacity <= exact.total // sequences.CHUNK


def test_unread_boundaries_stay_unread():
    seqs = sequences.packed_on_device(torch.tensor([0, 5]), 5)
    with pytest.raises(RuntimeError, match="never read back"):
        _ = seqs.chunks


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_batch_is_a_pack_of_its_rows(batch, tokens):
    rows, seqs = sequences.batched(batch, tokens), pack([tokens] * batch)
    assert rows.boundaries == seqs.boundaries
    assert rows.chunks == seqs.chunks
    assert (rows.chunk_capacity, rows.boundary_capacity) == (seqs.chunk_capacity, seqs.boundary_capacity)
    assert (rows.batch, rows.tokens, rows.n) == (batch, tokens, batch)


def test_plans_depend_on_values_alone():
    bounds = [0, 3, 9]
    first = sequences.packed(bounds, 9)
    bounds[1] = 5
    second = sequences.packed(bounds, 9)
    assert first.lengths == (3, 6)
    assert second.lengths == (5, 4)
    assert sequences.packed((0, 3, 9), 9) is first


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "cu must hold N \\+ 1 >= 2 boundaries, got 0"),
        ([0], "got 1"),
        ([1, 9], "cu must start at 0, got 1"),
        ([0, 5, 4, 9], "cu must not decrease, got 5 and then 4 at index 2"),
        ([0, 5], "cu must end at T=9, got 5"),
        ([0, 10], "cu must end at T=9, got 10"),
        ([0, -1, 9], "cu must not decrease, got 0 and then -1"),
    ],
    ids=["empty", "one", "first", "decrease", "short", "long", "negative"],
)
def test_boundaries_that_do_not_fit(bounds, message):
    with pytest.raises(ValueError, match=message):
        sequences.packed(bounds, 9, name="cu")


def test_many_sequences():
    seqs = pack([1, 2, 3, 0] * 5000)
    assert seqs.n == 20000
    assert seqs.chunk_capacity == 15000
    assert seqs.slots(with_edge=False) == 0
    assert seqs.slots(with_edge=True) == 15000


class TestOfCall:
    """The forms that a call takes; ops test the errors that their users see."""

    CPU = torch.device("cpu")

    @pytest.mark.parametrize(
        ("cu", "host"),
        [
            (None, [0, 3, 9]),
            (None, (0, 3, 9)),
            (None, torch.tensor([0, 3, 9], dtype=torch.int32)),
            (torch.tensor([0, 3, 9]), None),
            (torch.tensor([0, 5, 9]), torch.tensor([0, 3, 9])),
        ],
        ids=["list", "tuple", "host tensor", "tensor on the CPU", "both: the host's"],
    )
    def test_all_give_the_same_plan(self, cu, host):
        assert sequences.of_call(1, 9, self.CPU, cu, host) is sequences.packed((0, 3, 9), 9)

    def test_without_boundaries_rows_are_sequences(self):
        assert sequences.of_call(3, 9, self.CPU, None, None) is sequences.batched(3, 9)

    def test_a_batch_is_not_packed(self):
        with pytest.raises(ValueError, match="B=2"):
            sequences.of_call(2, 9, self.CPU, None, [0, 9])

    def test_boundaries_on_the_inputs_device_stay_unread(self):
        meta = torch.empty(3, dtype=torch.int32, device="meta")
        seqs = sequences.of_call(1, 9, meta.device, meta, None)
        assert seqs.cu_device is meta
        assert seqs.boundaries is None

    @pytest.mark.parametrize(
        ("cu", "host", "error", "part"),
        [
            ([0, 9], None, TypeError, "cu_seqlens must be a torch.Tensor"),
            (torch.empty(2, dtype=torch.int32, device="meta"), None, ValueError, "or the CPU, got meta"),
            (None, "0 9", TypeError, "a CPU tensor or a list of ints, got str"),
            (None, [0.0, 9.0], ValueError, "must hold ints, got float"),
            (None, torch.empty(2, dtype=torch.int32, device="meta"), ValueError, "on the CPU, got meta"),
            (torch.tensor([0, 3, 9]), [0, 9], ValueError, "as many values as cu_seqlens_cpu, 2, got 3"),
        ],
        ids=["list", "device", "text", "floats", "host form on a device", "lengths"],
    )
    def test_refused(self, cu, host, error, part):
        with pytest.raises(error, match=part):
            sequences.of_call(1, 9, self.CPU, cu, host)

    def test_arrays_are_refused(self):
        array = pytest.importorskip("numpy").array([0, 9])
        with pytest.raises(TypeError, match="a CPU tensor or a list of ints, got ndarray"):
            sequences.of_call(1, 9, self.CPU, None, array)


class TestSelection:
    """Some sequences of a call: spans with holes, slots of their own, chunks placed in the whole call."""

    SEQS = sequences.packed((0, 1, 65, 65, 265, 328), 328)

    def test_everything_is_the_call(self):
        seqs = self.SEQS
        chosen = seqs.select(range(seqs.n))
        for name in ("n", "total", "spans", "lengths", "chunk_counts", "chunks", "chunk_places"):
            assert getattr(chosen, name) == getattr(seqs, name), name
        assert [chosen.slots(edge) for edge in (False, True)] == [seqs.slots(edge) for edge in (False, True)]

    def test_a_part(self):
        chosen = self.SEQS.select((3, 2, 0))
        assert chosen.spans == ((65, 265), (65, 65), (0, 1))
        assert chosen.lengths == (200, 0, 1)
        assert chosen.chunks == (
            (0, 0, 65, 64),
            (0, 1, 129, 64),
            (0, 2, 193, 64),
            (0, 3, 257, 8),
            (2, 0, 0, 1),
        )
        assert chosen.chunk_places == (2, 3, 4, 5, 0)
        assert (chosen.n, chosen.total, chosen.slots(True), chosen.slots(False)) == (3, 328, 5, 3)
        assert [chosen.state_slot(s, c, with_edge=True) for s, c, *_ in chosen.chunks] == [0, 1, 2, 3, 4]

    def test_of_a_selection(self):
        chosen = self.SEQS.select((3, 4, 0)).select((1, 2))
        assert chosen.spans == ((265, 328), (0, 1))
        assert chosen.chunk_places == (6, 0)

    def test_of_nothing(self):
        chosen = self.SEQS.select(())
        assert (chosen.n, chosen.chunks, chosen.slots(True), chosen.slots(False)) == (0, (), 0, 0)

    def test_has_no_boundaries(self):
        with pytest.raises(RuntimeError, match="spans and no boundaries"):
            self.SEQS.select((0,)).host_boundaries()

    def test_needs_the_host(self):
        with pytest.raises(RuntimeError, match="exist on a device only"):
            sequences.packed_on_device(torch.zeros(3, dtype=torch.int32), 5).select((0,))
