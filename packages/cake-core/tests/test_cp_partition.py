"""Where the tokens of a pack lie, against brute force and flash-linear-attention's own builder."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from cake.core import cp
from cake.core.cp import _joint, _plan, partition

WORLDS = (1, 2, 3, 4, 8)


def random_pack(seed, multiple=1, *, per_document=False):
    """Boundaries of documents that end anywhere, on borders and nowhere; the total divides by `multiple`."""
    rng = random.Random(seed)
    draw = rng.choice(
        [
            lambda: rng.randint(0, 3),
            lambda: rng.randint(0, 300),
            lambda: rng.choice([0, 0, 64, 128]),
            lambda: rng.choice([1, 500]),
        ]
    )
    lengths = [draw() for _ in range(rng.randint(1, 9))]
    if per_document:
        lengths = [length * multiple for length in lengths]
    elif rest := sum(lengths) % multiple:
        lengths[rng.randrange(len(lengths))] += multiple - rest
    return tuple(accumulate(lengths, initial=0))


def random_fragments(seed, bounds, world):
    """Cuts anywhere, handed out in any order; some ranks may get nothing, some fragments are empty."""
    rng = random.Random(seed)
    cuts = sorted({0, bounds[-1], *(rng.randint(0, bounds[-1]) for _ in range(rng.randint(0, 3 * world)))})
    ranges = [*pairwise(cuts), (cuts[-1], cuts[-1])]
    rng.shuffle(ranges)
    local = [[] for _ in range(world)]
    for fragment in ranges:
        local[rng.randrange(world)].append(fragment)
    return tuple(map(tuple, local))


def packs(world):
    """(boundaries, layout, fragments) of many partitions."""
    for seed in range(25):
        yield random_pack(seed, world), "contiguous", None
        yield random_pack(seed, 2 * world), "zigzag", None
        yield random_pack(seed, 2 * world, per_document=True), "zigzag_per_document", None
        bounds = random_pack(seed)
        yield bounds, "contiguous", random_fragments(seed, bounds, world)


def owned_tokens(bounds, world, layout, fragments):
    """Global tokens of each rank in local order, from the definition of the layouts."""
    total = bounds[-1]
    if fragments is not None:
        return [[t for start, end in local for t in range(start, end)] for local in fragments]
    owned = [[] for _ in range(world)]
    spans = [(0, total)] if layout != "zigzag_per_document" else pairwise(bounds)
    parts = world if layout == "contiguous" else 2 * world
    for start, end in spans:
        size = (end - start) // parts
        for part in range(parts):
            owner = part if part < world else 2 * world - 1 - part
            owned[owner] += range(start + part * size, start + (part + 1) * size)
    return owned


def document_of(bounds, token):
    return next(d for d, (start, end) in enumerate(pairwise(bounds)) if start <= token < end)


@pytest.mark.parametrize("world", WORLDS)
class TestOwnership:
    def test_every_token_where_the_layout_says(self, world):
        for bounds, layout, fragments in packs(world):
            made = partition(bounds, world, layout, fragments)
            expected = owned_tokens(bounds, world, layout, fragments)
            assert [[t for a, b in local for t in range(a, b)] for local in made.fragments] == expected
            for rank in range(world):
                pieces = made.pieces[rank]
                assert [t for piece in pieces for t in range(piece.start, piece.end)] == expected[rank]
                ends = [piece.offset + piece.end - piece.start for piece in pieces]
                assert made.local_boundaries(rank) == ((0, *ends) if ends else (0, 0))
                assert [piece.offset for piece in pieces] == list(made.local_boundaries(rank)[: len(pieces)])

    def test_pieces_are_as_long_as_they_can_be(self, world):
        for bounds, layout, fragments in packs(world):
            for local in partition(bounds, world, layout, fragments).pieces:
                for piece in local:
                    assert piece.start < piece.end
                    assert bounds[piece.document] <= piece.start < piece.end <= bounds[piece.document + 1]
                for a, b in pairwise(local):
                    assert (a.document, a.end) != (b.document, b.start)

    def test_chains_hold_documents_in_token_order(self, world):
        for bounds, layout, fragments in packs(world):
            made = partition(bounds, world, layout, fragments)
            chained = {}
            for chain in made.chains:
                document = chain[0].document
                chained[document] = chain
                assert (chain[0].start, chain[-1].end) == (bounds[document], bounds[document + 1])
                assert all(a.end == b.start and b.document == document for a, b in pairwise(chain))
            pieces = [piece for local in made.pieces for piece in local]
            for document in range(len(bounds) - 1):
                count = sum(piece.document == document for piece in pieces)
                assert (count > 1) == (document in chained)
            assert made.crosses == any(len({p.rank for p in chain}) > 1 for chain in chained.values())

    def test_convolutions_find_the_tokens_before_them(self, world):
        for bounds, layout, fragments in packs(world):
            made = partition(bounds, world, layout, fragments)
            owned = owned_tokens(bounds, world, layout, fragments)
            for kernel in (1, 2, 4, 9):
                for rank in range(world):
                    for piece, boundary in zip(
                        made.pieces[rank], made.conv_boundaries(rank, kernel), strict=True
                    ):
                        wanted = range(max(bounds[piece.document], piece.start - kernel + 1), piece.start)
                        assert boundary.tokens == len(wanted)
                        found = [t for r, first, n in boundary.sources for t in owned[r][first : first + n]]
                        assert found == list(wanted)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("even", [False, True])
class TestPlan:
    def test_merges_give_every_piece_the_state_of_a_serial_walk(self, world, even):
        # A map (m, b) of numbers for every piece, modulo a prime: merged as planned, and walked one by one.
        prime = 1_000_003
        for i, (bounds, layout, fragments) in enumerate(packs(world)):
            made = partition(bounds, world, layout, fragments)
            plans = [_plan.make_plan(made, rank, even) for rank in range(world)]
            rng = random.Random(i)
            maps = {p: (rng.randrange(prime), rng.randrange(prime)) for local in made.pieces for p in local}
            expected = self.walk(made, maps, prime, reverse=False)
            gathered = self.gather(made, plans, maps, "forward", world)
            for rank, plan in enumerate(plans):
                rows = self.merge(plan.forward, gathered, gathered, rank, plan, prime)
                entered = self.pieces(made, plan, rank, ("middle", "last"))
                assert rows == [expected[piece] for piece in entered]
                assert len(rows) == plan.forward.receivers

            duals = {piece: (m, rng.randrange(prime)) for piece, (m, _) in maps.items()}
            expected = self.walk(made, duals, prime, reverse=True)
            adjoints = self.gather(made, plans, duals, "backward", world)
            for rank, plan in enumerate(plans):
                offset = 0 if plan.collective else rank * plan.forward.tiles
                kept = [gathered[offset + tile] for tile in plan.kept]
                rows = self.merge(plan.backward, adjoints, kept, rank, plan, prime)
                left = self.pieces(made, plan, rank, ("first", "middle"))
                assert rows == [expected[piece] for piece in left]

    def test_ranks_agree(self, world, even):
        for bounds, layout, fragments in packs(world):
            made = partition(bounds, world, layout, fragments)
            plans = [_plan.make_plan(made, rank, even) for rank in range(world)]
            for attribute in ("collective", "joined", "digest"):
                assert len({getattr(plan, attribute) for plan in plans}) == 1
            sizes = {(plan.forward.tiles, plan.backward.tiles) for plan in plans}
            assert len(sizes) == 1
            forward, backward = sizes.pop()
            assert (forward > 0) == (backward > 0) == bool(made.chains)
            assert not even or forward == backward
            assert plans[0].collective == made.crosses

    def test_every_local_sequence_has_one_role(self, world, even):
        for bounds, layout, fragments in packs(world):
            made = partition(bounds, world, layout, fragments)
            for rank in range(world):
                plan = _plan.make_plan(made, rank, even)
                spans = [span for role in plan.roles.values() if role is not None for span in role.spans]
                assert sorted(spans) == [(p.offset, p.offset + p.end - p.start) for p in made.pieces[rank]]

    def pieces(self, made, plan, rank, roles):
        by_span = {(p.offset, p.offset + p.end - p.start): p for p in made.pieces[rank]}
        chosen = [plan.roles[role] for role in roles if plan.roles[role] is not None]
        return [by_span[span] for seqs in chosen for span in seqs.spans]

    def gather(self, made, plans, maps, direction, world):
        """Every rank's tiles, holding numbers: what the exchange brings everywhere."""
        tiles = []
        for rank, plan in enumerate(plans):
            d = getattr(plan, direction)
            local = [None] * d.tiles
            senders = ("first", "middle") if direction == "forward" else ("middle", "last")
            for tile, piece in zip(d.b, self.pieces(made, plan, rank, senders), strict=True):
                assert local[tile] is None
                local[tile] = maps[piece][1]
            for tile, piece in zip(
                d.m, self.pieces(made, plan, rank, ("middle",)), strict=direction == "forward"
            ):
                assert local[tile] is None
                local[tile] = maps[piece][0]
            tiles += local
        return tiles

    def merge(self, direction, b, m, rank, plan, prime):
        offset = 0 if plan.collective else rank * direction.tiles
        rows = [None] * direction.receivers
        for chain in direction.chains:
            state = None
            for b_tile, m_tile, row in chain:
                if m_tile < 0:
                    state = b[offset + b_tile]
                else:
                    map_tile = m_tile if m is not b else offset + m_tile
                    state = (m[map_tile] * state + b[offset + b_tile]) % prime
                if row >= 0:
                    assert rows[row] is None
                    rows[row] = state
        return rows

    def walk(self, made, maps, prime, reverse):
        """The state that enters each piece but the first of its chain, from the other end if `reverse`."""
        entering = {}
        for chain in made.chains:
            order = chain[::-1] if reverse else chain
            state = 0
            for piece, after in pairwise(order):
                m, b = maps[piece]
                state = entering[after] = (m * state + b) % prime
        return entering


class TestCut:
    """Pieces as segments of a call's table, where empty ones stand for what lies on other ranks."""

    @pytest.mark.parametrize("most", [1, 2, 128])
    def test_segments_cover_their_pieces(self, monkeypatch, most):
        monkeypatch.setattr(_joint, "MOST_CHUNKS", most)
        for bounds, layout, fragments in packs(3):
            made = partition(bounds, 3, layout, fragments)
            for rank in range(3):
                plan = _plan.make_plan(made, rank, False)
                _joint._cut.cache_clear()
                cut = cp.cut_of(plan, 2)
                if cut is None or not plan.seqs.total:
                    assert plan.seqs.total == 0 or not plan.forward.tiles
                    continue
                self.check(plan, cut, most)

    def check(self, plan, cut, most):
        segments, named = cut.segments, set()
        for s, (start, end) in enumerate(plan.seqs.spans):
            run = cut.runs[s]
            named.update(run)
            spans = [segments.spans[i] for i in run]
            assert (spans[0][0], spans[-1][1]) == (start, end)
            assert all(a[1] == b[0] and (a[1] - start) % 64 == 0 for a, b in pairwise(spans))
            assert {segments.sequence[i] for i in run} == {s}
            roles = {role for role, ids in plan.ids.items() if s in ids}
            assert roles == {"alone"} or all(segments.chunk_counts[i] <= most for i in run)
            entered, left = bool(roles & {"middle", "last"}), bool(roles & {"first", "middle"})
            assert segments.opens[run[0]] == entered
            assert segments.followed[run[-1]] == left
            assert all(segments.opens[i] for i in run[1:])
            assert all(segments.followed[i] for i in run[:-1])
            for there, (i,), at in ((entered, cut.before([s]), start), (left, cut.behind([s]), end)):
                if there:
                    named.add(i)
                    assert segments.spans[i] == (at, at)
                    assert segments.sequence[i] == s
        assert named == set(range(segments.n))
        # What a kernel is told: a boundary where a segment opens is one where the one before it is followed.
        assert segments.followed == (*segments.opens[1:], False)
        assert not segments.opens[0]
        assert segments.sequence == tuple(n - 1 for n in accumulate(int(not x) for x in segments.opens))


class TestRefusals:
    @pytest.mark.parametrize(
        ("bounds", "world", "layout", "message"),
        [
            ((0, 5, 16, 65), 4, "contiguous", "multiple of the world size, 4, got 65"),
            ((0, 5, 16, 60), 8, "zigzag", "multiple of twice the world size, 16, got 60"),
            ((0, 8, 20), 4, "zigzag_per_document", "tokens of document 1 must be a multiple of .* 8, got 12"),
            ((0, 8), 2, "ring", "layout must be one of 'contiguous', 'zigzag', .* got 'ring'"),
        ],
    )
    def test_tokens_that_do_not_divide(self, bounds, world, layout, message):
        with pytest.raises(ValueError, match=message):
            partition(bounds, world, layout, None)

    @pytest.mark.parametrize(
        ("fragments", "message"),
        [
            ((((0, 8),),), "one list for each of 2 ranks, got 1"),
            ((((0, 4),), ((5, 8),)), "no rank holds token 4"),
            ((((0, 4),), ((4, 7),)), "no rank holds token 7"),
            ((((0, 5),), ((4, 8),)), "several ranks hold token 4"),
            ((((0, 4),), ((4, 9),)), r"from 0 to 8, got \(4, 9\)"),
            ((((4, 0),), ((4, 8),)), r"from 0 to 8, got \(4, 0\)"),
            ((((-1, 4),), ((4, 8),)), r"from 0 to 8, got \(-1, 4\)"),
        ],
    )
    def test_fragments_that_do_not_fit(self, fragments, message):
        with pytest.raises(ValueError, match=message):
            partition((0, 8), 2, "contiguous", fragments)

    def test_fragments_and_a_layout(self):
        with pytest.raises(ValueError, match="layout must be left out with fragments, got 'zigzag'"):
            partition((0, 8), 2, "zigzag", (((0, 4),), ((4, 8),)))


class TestBesideFla:
    """The flat layouts own what flash-linear-attention's own builder gives each rank."""

    @pytest.fixture
    def theirs(self):
        context = pytest.importorskip("fla.ops.cp.context", reason="flash-linear-attention isn't installed")
        # Versions without the zigzag layout don't know the argument.
        zigzag = hasattr(context.FLACPContext, "layout")

        def build(layout, *arguments, **options):
            if layout == "zigzag":
                return context.get_cp_cu_seqlens(*arguments, **options, layout=layout) if zigzag else None
            return context.get_cp_cu_seqlens(*arguments, **options)

        return build

    @pytest.mark.parametrize("world", WORLDS)
    def test_same_ownership_for_random_lengths(self, theirs, world):
        compared = 0
        for seed in range(200):
            for layout, parts in (("contiguous", world), ("zigzag", 2 * world)):
                bounds = random_pack(seed, parts)
                if bounds[-1] < parts:
                    continue
                made = partition(bounds, world, layout, None)
                for rank in range(world):
                    cu = torch.tensor(bounds)
                    fla = theirs(layout, cu, cu, world_size=world, rank=rank)
                    if fla is None:
                        continue
                    got = list(made.local_boundaries(rank))
                    # Two parts of theirs that lie next to each other in one document are one piece of ours.
                    joined = layout == "zigzag" and rank == world - 1
                    inside = joined and fla.part_len not in got
                    assert sorted({*got, fla.part_len} if inside else got) == fla.cu_seqlens_cpu.tolist()
                    self.compare_chains(made, fla, rank, layout)
                    compared += 1
        assert compared > 100

    def compare_chains(self, made, fla, rank, layout):
        pieces = made.pieces[rank]
        conv = made.conv_boundaries(rank, 10**9)
        if layout == "contiguous":
            assert conv[0].tokens == fla.pre_num_conv_tokens
            chains = {p: (chain, i) for chain in made.chains for i, p in enumerate(chain)}
            first, last = chains.get(pieces[0]), chains.get(pieces[-1])
            assert fla.pre_num_ranks == (first[1] if first else 0)
            assert fla.post_num_ranks == (len(last[0]) - 1 - last[1] if last else 0)
        else:
            assert conv[0].tokens == fla.pre_num_conv_tokens_by_part[0]


def test_owner_of_every_token_is_listed_once():
    made = partition((0, 5, 16, 64), 4, "contiguous", None)
    assert made.fragments == (((0, 16),), ((16, 32),), ((32, 48),), ((48, 64),))
    assert [made.local_boundaries(r) for r in range(4)] == [(0, 5, 16), (0, 16), (0, 16), (0, 16)]
    assert [[p.rank for p in chain] for chain in made.chains] == [[1, 2, 3]]


def test_public_names():
    for name in cp.__all__:
        assert getattr(cp, name) is not None
