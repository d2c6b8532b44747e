"""Contexts: made of host metadata alone, remembered by content, refused when they can't be."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cake.core.cp import _context, _fla, _partition, build_kcp_context, of_call, partition, untraced

CPU = torch.device("cpu")


@pytest.fixture
def world(monkeypatch):
    """Pretends to be a rank of a group, and forbids every collective."""

    def enter(rank, size):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)

    def forbidden(*_, **__):
        raise AssertionError("a context must not communicate")

    for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, forbidden)
    if hasattr(dist, "all_gather_single"):
        monkeypatch.setattr(dist, "all_gather_single", forbidden)
    return enter


class TestBuild:
    def test_without_a_group(self):
        context = build_kcp_context([0, 3, 3, 10])
        assert (context.rank, context.world_size, context.tokens) == (0, 1, 10)
        assert (context.boundaries, context.documents) == ((0, 3, 10), (0, 2))
        assert context.fragments == ((0, 10),)
        assert not context.crosses

    def test_one_rank_of_a_group(self, world):
        world(1, 3)
        context = build_kcp_context([0, 4, 30])
        assert (context.boundaries, context.documents, context.crosses) == ((0, 10), (1,), True)
        assert context.fragments == ((10, 20),)
        assert [(c.tokens, c.sources) for c in context.conv] == [(3, ((0, 7, 3),))]

    @pytest.mark.parametrize(
        "given",
        [torch.tensor([0, 4, 30]), torch.tensor([0, 4, 30], dtype=torch.int32), (0, 4, 30), range(0, 31, 30)],
        ids=["int64", "int32", "tuple", "range"],
    )
    def test_boundaries_in_any_form(self, given):
        assert build_kcp_context(given).boundaries[-1] == 30

    def test_boundaries_for_other_layers(self):
        context = build_kcp_context([0, 3, 10], device="cpu")
        assert context.cu_seqlens.tolist() == [0, 3, 10]
        assert (context.cu_seqlens.dtype, context.cu_seqlens.device) == (torch.int32, CPU)
        assert context.cu_seqlens is context.cu_seqlens

    def test_boundaries_on_the_host_are_there_whatever_the_default_device(self):
        with torch.device("meta"):
            context = build_kcp_context([0, 3, 10])
            assert context.cu_seqlens_cpu.device == context.cu_seqlens.device == CPU

    def test_the_kernel_size(self, world):
        world(1, 2)
        sizes = [build_kcp_context([0, 8], conv_kernel_size=size).conv[0].tokens for size in (1, 2, 4, 9)]
        assert sizes == [0, 1, 3, 4]

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
    def test_shards_hold_the_layouts_tokens(self, world, layout):
        x = torch.arange(48.0).view(1, 48, 1)
        seen = []
        for rank in range(3):
            world(rank, 3)
            context = build_kcp_context([0, 12, 48], layout=layout)
            part = context.shard(x)
            assert part.shape == (1, context.tokens, 1)
            seen += part.flatten().tolist()
        assert sorted(seen) == x.flatten().tolist()

    def test_shards_of_another_pack(self):
        with pytest.raises(ValueError, match="must have the pack's 10 tokens, got 9"):
            build_kcp_context([0, 10]).shard(torch.zeros(1, 9))

    def test_a_rank_without_tokens(self, world):
        world(1, 2)
        context = build_kcp_context([0, 8], fragments=[[(0, 8)], []])
        assert (context.tokens, context.boundaries, context.documents, context.conv) == (0, (0, 0), (), ())
        assert context.shard(torch.zeros(1, 8, 2)).shape == (1, 0, 2)

    def test_a_pack_without_tokens(self, world):
        world(1, 2)
        context = build_kcp_context([0, 0, 0])
        assert (context.tokens, context.crosses) == (0, False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "error", "message"),
        [
            ("0,4", TypeError, "must be a CPU tensor or a list of ints, got str"),
            ([0, 4.5], ValueError, "must hold ints, got float, int"),
            ([0], ValueError, r"N \+ 1 >= 2 boundaries that rise from 0, got \(0,\)"),
            ([1, 4], ValueError, r"rise from 0, got \(1, 4\)"),
            ([0, 4, 2], ValueError, r"rise from 0, got \(0, 4, 2\)"),
            (torch.zeros(2), ValueError, "must be int32 or int64, got float32"),
            (torch.zeros((2, 2), dtype=torch.int64), ValueError, r"must be \[N \+ 1\]"),
            (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "must be on the CPU, got meta"),
        ],
    )
    def test_boundaries(self, given, error, message):
        with pytest.raises(error, match=f"cu_seqlens_global {message}|cu_seqlens_global .*{message}"):
            build_kcp_context(given)

    def test_tokens_that_do_not_divide_are_refused_on_every_rank(self, world):
        for rank in range(4):
            world(rank, 4)
            with pytest.raises(ValueError, match="multiple of the world size, 4, got 65"):
                build_kcp_context([0, 5, 16, 65])

    def test_a_kernel_size_of_nothing(self):
        with pytest.raises(ValueError, match="conv_kernel_size must be at least 1, got 0"):
            build_kcp_context([0, 4], conv_kernel_size=0)
        with pytest.raises(TypeError, match=r"conv_kernel_size must be an int, got 2\.5"):
            build_kcp_context([0, 4], conv_kernel_size=2.5)

    @pytest.mark.parametrize("fragments", [[3], [[4]], [[(0, 4.0)]], 7], ids=repr)
    def test_fragments(self, fragments):
        with pytest.raises(ValueError, match="fragments must be a list of"):
            build_kcp_context([0, 4], fragments=fragments)

    def test_a_group_without_this_process(self, world):
        world(-1, 4)
        with pytest.raises(ValueError, match="must be one that this process belongs to"):
            build_kcp_context([0, 4])

    def test_a_context_of_another_world(self, world):
        context = build_kcp_context([0, 4])
        world(1, 2)
        with pytest.raises(ValueError, match="rank 1 of 2, got rank 0 of 1"):
            of_call(context, CPU)

    @pytest.mark.parametrize("given", [object(), "context", {}], ids=["object", "str", "dict"])
    def test_something_else(self, given):
        with pytest.raises(TypeError, match=r"must be a KcpContext .* got (object|str|dict)"):
            of_call(given, CPU)


class TestMemory:
    """Partitions are remembered by content: nothing depends on which object the boundaries came in."""

    def test_equal_boundaries_share_a_partition(self):
        first = build_kcp_context([0, 7, 20])
        again = build_kcp_context(torch.tensor([0, 7, 20], dtype=torch.int32))
        assert first.partition is again.partition
        assert first.plan("cpu") is again.plan("cpu")

    def test_a_tensor_refilled_in_place(self):
        cu = torch.tensor([0, 7, 20])
        first = build_kcp_context(cu)
        cu[1] = 11
        assert build_kcp_context(cu).boundaries == (0, 11, 20)
        assert first.boundaries == (0, 7, 20)

    def test_a_list_changed_in_place(self):
        cu = [0, 7, 20]
        build_kcp_context(cu)
        cu[1] = 11
        assert build_kcp_context(cu).boundaries == (0, 11, 20)

    def test_many_short_lived_tensors(self):
        rng = random.Random(0)
        for _ in range(300):
            lengths = [rng.randint(0, 50) for _ in range(8)]
            cu = torch.tensor([0, *lengths]).cumsum(0)
            expected = tuple(dict.fromkeys(cu.tolist())) if sum(lengths) else (0, 0)
            assert build_kcp_context(cu).boundaries == expected
            del cu
            gc.collect(0)

    def test_the_last_64(self):
        partition.cache_clear()
        for i in range(1, 100):
            build_kcp_context([0, i])
        assert partition.cache_info().currsize == partition.cache_info().maxsize == 64

    def test_groups_are_not_held(self):
        class Group:
            alive = 0

            def __init__(self):
                Group.alive += 1

            def __del__(self):
                Group.alive -= 1

        context = _context.KcpContext(
            _partition.partition((0, 4), 1, "contiguous", None), 0, Group(), None, 4
        )
        context.plan("cpu")
        del context
        gc.collect()
        assert Group.alive == 0


class TestFlaContexts:
    """Contexts of flash-linear-attention, of which one rank knows its own edges alone."""

    @staticmethod
    def context(**values):
        kind = type("FLACPContext", (SimpleNamespace,), {"__module__": "fla.ops.cp.context"})
        return kind(
            **{"group": None, "cu_seqlens": None, "cu_seqlens_cpu": None, "layout": "contiguous", **values}
        )

    def test_without_a_group(self):
        call = of_call(self.context(cu_seqlens=torch.tensor([0, 3, 10])), CPU)
        assert (call.path, call.plan.collective, call.plan.seqs.boundaries) == ("fla", False, (0, 3, 10))
        assert call.plan.roles["alone"].spans == ((0, 3), (3, 10))

    def test_what_runs_is_det_and_a_configured_fast_is_told_once(self, caplog):
        caplog.set_level("INFO", "cake")
        call = of_call(self.context(cu_seqlens=torch.tensor([0, 3, 10])), CPU)
        assert [call.variant("told", variant) for variant in ("det", "fast", "fast")] == ["det"] * 3
        assert of_call(build_kcp_context([0, 3, 10]), CPU).variant("told", "fast") == "fast"
        (record,) = caplog.records
        assert record.message.startswith("told runs det under flash-linear-attention's context")

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_states_of_a_serial_walk(self, layout, size):
        """Merged as the plan of each rank says, numbers give what a walk from end to end gives."""
        prime = 1_000_003
        rng = random.Random(size)
        parts = size if layout == "contiguous" else 2 * size
        for _ in range(40):
            share = rng.choice([1, 5, 70])
            total = parts * share
            bounds = [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 5))), total]
            segments, plans = self.cut(bounds, share, size, layout)
            maps = {
                key: (rng.randrange(prime), rng.randrange(prime), rng.randrange(prime)) for key in segments
            }
            for direction in ("forward", "backward"):
                which = 1 if direction == "forward" else 2
                gathered = []
                for rank in range(size):
                    d = getattr(plans[rank], direction)
                    local = [[None, None] for _ in range(d.tiles)]
                    senders = ("first", "middle") if direction == "forward" else ("middle", "last")
                    for tile, key in zip(d.b, self.of_roles(plans[rank], rank, senders), strict=True):
                        local[tile][0] = maps[key][which]
                    for tile, key in zip(d.m, self.of_roles(plans[rank], rank, ("middle",)), strict=True):
                        local[tile][1] = maps[key][0]
                    gathered += local
                for rank in range(size):
                    d = getattr(plans[rank], direction)
                    rows = [None] * d.receivers
                    for chain in d.chains:
                        state = 0
                        for b, m, row in chain:
                            state = gathered[b][0] + (0 if m < 0 else gathered[m][1] * state)
                            state %= prime
                            if row >= 0:
                                rows[row] = state
                    receivers = ("middle", "last") if direction == "forward" else ("first", "middle")
                    expected = self.walk(segments, maps, which, prime)
                    keys = self.of_roles(plans[rank], rank, receivers)
                    assert rows == [expected[key] for key in keys]

    @staticmethod
    def of_roles(plan, rank, roles):
        return [
            (rank, span) for role in roles if plan.roles[role] is not None for span in plan.roles[role].spans
        ]

    @staticmethod
    def walk(segments, maps, which, prime):
        """The state that enters every segment, from the front (which = 1) or from the back."""
        by_document = {}
        for key, (document, start) in segments.items():
            by_document.setdefault(document, []).append((start, key))
        entering = {}
        for keys in by_document.values():
            state = 0
            for _, key in sorted(keys, reverse=which == 2):
                entering[key] = state
                state = (maps[key][0] * state + maps[key][which]) % prime
        return entering

    @staticmethod
    def cut(bounds, share, size, layout):
        """Segments (rank, local span) -> (document, start) of every rank, and plans, by definition."""
        segments, plans = {}, []
        for rank in range(size):
            places = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
            local, counts, before, after = [0], [], [], []
            for place in places:
                start, end = place * share, (place + 1) * share
                cuts = sorted({start, end, *(b for b in bounds if start < b < end)})
                counts.append(len(cuts) - 1)
                documents = [max(i for i, b in enumerate(bounds[:-1]) if b <= c) for c in cuts[:-1]]
                before.append(place - bounds[documents[0]] // share)
                after.append((bounds[documents[-1] + 1] - 1) // share - place)
                for document, a, b in zip(documents, cuts, cuts[1:], strict=False):
                    segments[rank, (local[-1], local[-1] + b - a)] = (document, a)
                    local.append(local[-1] + b - a)
            plan = _fla.fla_plan(tuple(local), rank, size, layout, tuple(counts), tuple(before), tuple(after))
            plans.append(plan)
        return segments, plans

    def test_boundaries_on_a_device_alone(self):
        context = self.context(cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"))
        with pytest.raises(ValueError, match="cu_seqlens_cpu must be on the CPU, got meta"):
            of_call(context, CPU)

    def test_edges_beyond_the_group(self, world):
        world(1, 2)
        cu = torch.tensor([0, 4])
        context = self.context(group=object(), cu_seqlens_cpu=cu, pre_num_ranks=2, post_num_ranks=0)
        with pytest.raises(ValueError, match="reaches 2 parts before and 0 after the part 1 of 2"):
            of_call(context, CPU)

    def test_a_part_without_sequences(self, world):
        world(0, 2)
        zigzag = {"front_num_seqs": 0, "pre_num_ranks_by_part": (0, 0), "post_num_ranks_by_part": (0, 0)}
        context = self.context(group=object(), cu_seqlens_cpu=torch.tensor([0, 4]), layout="zigzag", **zigzag)
        with pytest.raises(ValueError, match="a sequence in every part, got 0"):
            of_call(context, CPU)

    def test_another_layout(self, world):
        world(0, 2)
        context = self.context(group=object(), cu_seqlens_cpu=torch.tensor([0, 4]), layout="ring")
        with pytest.raises(ValueError, match="layout must be 'contiguous' or 'zigzag', got 'ring'"):
            of_call(context, CPU)


class TestUntraced:
    @staticmethod
    def double(x):
        return 2 * x

    def test_leaves_what_torch_leaves(self):
        """Everything that a tracer reads of a disabled function."""
        names = {
            name for name in vars(torch.compiler.disable(self.double)) if name.startswith("_torchdynamo")
        }
        ours = untraced(self.double)
        assert names - set(vars(ours)) <= {"_torchdynamo_wrapper_id"}
        for name in names & set(vars(ours)):
            assert getattr(ours, name) == getattr(torch.compiler.disable(self.double), name)
        assert ours(3) == 6

    def test_breaks_compiled_regions(self):
        ours = untraced(self.double)

        def region(x):
            return ours(x + 1) + 1

        x = torch.ones(3)
        assert torch.equal(torch.compile(region, backend="eager")(x), region(x))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.compiler.disable"):
            torch.compile(region, backend="eager", fullgraph=True)(x)

    def test_imports_no_compiler(self):
        code = "import sys, cake.core.cp; assert 'torch._dynamo' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)
