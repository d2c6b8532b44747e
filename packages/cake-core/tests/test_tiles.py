"""The layout of torch twins: every token once, padding where it belongs, states in their slots."""

from __future__ import annotations

import pytest
import torch

from cake.core import tiles
from cake.core.sequences import CHUNK, packed

CPU = torch.device("cpu")
LENGTHS = (1, 64, 0, 65, 200, 63, 0)


@pytest.fixture
def seqs():
    bounds = [0]
    for length in LENGTHS:
        bounds.append(bounds[-1] + length)
    return packed(bounds, bounds[-1])


@pytest.fixture(params=[1, 3, 1000], ids="TILE{}".format)
def tile_size(request, monkeypatch):
    monkeypatch.setitem(tiles.TILE, "cpu", request.param)
    return request.param


def test_blocks_hold_every_chunk_in_order(seqs, tile_size):
    seen, chunks = [], []
    for tile in tiles.blocks(seqs, 1, CPU):
        assert tile.count <= max(tile_size, 1)
        assert tile.first == int(tile.tokens[0])
        seen += tile.tokens.tolist()
        chunks += range(*tile.span)
    assert seen == list(range(seqs.total))
    assert chunks == list(range(len(seqs.chunks)))


@pytest.mark.parametrize("reverse", [False, True])
def test_groups_walk_every_chunk_once(seqs, tile_size, reverse):
    seen, places = [], []
    for group in tiles.groups(seqs, 1, CPU):
        order = []
        for chunk, tile in group.steps(reverse=reverse):
            assert tile.count == group.active(chunk)
            order.append(chunk)
            seen += tile.tokens.tolist()
            places += group.chunks(chunk, tile.count).tolist()
            for place, start in zip(
                group.chunks(chunk, tile.count).tolist(), tile.index[:, 0].tolist(), strict=True
            ):
                assert seqs.chunks[place][1:3] == (chunk, start)
        assert order == sorted(order, reverse=reverse)
    assert sorted(seen) == list(range(seqs.total))
    assert sorted(places) == list(range(len(seqs.chunks)))


@pytest.mark.parametrize("edge", [False, True])
def test_slots_of_a_walk_are_those_of_the_plan(seqs, tile_size, edge):
    for group in tiles.groups(seqs, 1, CPU):
        for chunk, tile in group.steps():
            members = group.members[: tile.count]
            if edge or chunk > 0:
                wanted = [seqs.state_slot(s, chunk, with_edge=edge) for s in members]
                assert group.slots(chunk, tile.count, edge, after=False).tolist() == wanted
            count = tile.count if edge else group.active(chunk + 1)
            wanted = [seqs.adjoint_slot(s, chunk, with_edge=edge) for s in members[:count]]
            assert group.slots(chunk, count, edge, after=True).tolist() == wanted


def test_rows_are_padded_and_come_back(seqs, tile_size):
    x = torch.randn(seqs.total, 2, 3).bfloat16()
    rows, vectors, heads = (torch.empty_like(y) for y in (x, x[..., 0], x[..., 0]))
    for tile in tiles.blocks(seqs, 2, CPU):
        for store, got, source in (
            (rows, tile.rows(x), x),
            (rows, tile.rows_of(x.transpose(0, 1)), x),
            (vectors, tile.vectors(x[..., 0]), x[..., 0]),
        ):
            assert got.dtype == torch.float32
            assert got.shape == (tile.count, 2, CHUNK, *source.shape[2:])
            tile.store(store, got)
            if tile.pad is not None:
                assert not got.transpose(1, 2)[tile.pad].any()
        last = tile.heads_of(x[..., 0].T.float())
        tile.store(heads, last)
        if tile.pad is not None:
            # The last value of the chunk, repeated.
            for row, pad in zip(last, tile.pad, strict=True):
                if pad.any():
                    end = int((~pad).sum())
                    assert torch.equal(row[:, end:], row[:, end - 1 :][:, :1].expand(2, CHUNK - end))
    for got, source in ((rows, x), (vectors, x[..., 0]), (heads, x[..., 0])):
        assert torch.equal(got, source)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("edge", [False, True])
def test_states_without_a_slot_are_zero(seqs, tile_size, edge, after):
    tape = 1 + torch.arange(seqs.slots(edge)).view(-1, 1, 1).bfloat16()
    find = seqs.adjoint_slot if after else seqs.state_slot
    wanted = [find(s, c, with_edge=edge) for s, c, _, _ in seqs.chunks]
    got = [
        x for tile in tiles.blocks(seqs, 1, CPU) for x in tile.states(tape, seqs, edge, after=after).flatten()
    ]
    assert got == [0 if slot is None else 1 + slot for slot in wanted]


@pytest.mark.parametrize("edge", [False, True])
def test_a_selection_walks_its_own_tokens(seqs, tile_size, edge):
    chosen = seqs.select((4, 2, 0, 3))
    tokens = [t for start, end in chosen.spans for t in range(start, end)]
    assert [t for tile in tiles.blocks(chosen, 1, CPU) for t in tile.tokens.tolist()] == tokens
    walked, slots = [], []
    for group in tiles.groups(chosen, 1, CPU):
        for chunk, tile in group.steps():
            walked += tile.tokens.tolist()
            starts = tile.index[:, 0].tolist()
            assert [seqs.chunks[p][2] for p in group.chunks(chunk, tile.count).tolist()] == starts
            if edge or chunk > 0:
                slots += group.slots(chunk, tile.count, edge, after=False).tolist()
    assert sorted(walked) == sorted(tokens)
    assert sorted(slots) == list(range(chosen.slots(edge)))
