"""Packs over two GPUs with NCCL, both ops: results, bits, and that no rank waits for ever."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cake.core.bench import Shape, fla_context
from cake.core.bench._spread import _shard
from cake.core.cp import _exchange, build_kcp_context
from cake.core.testing import Ranks, assert_bitwise_equal, relative_error

OPS = ("gdn", "kda")
#: Two documents that lie on both ranks, or a long one and short ones, at the border too. All divide by 4.
PACKS = {
    "one document": (0, 1400),
    "short ones": (0, 3, 700, 700, 1022, 1026, 1900, 2048),
    "ends on the border": (0, 300, 1024, 2048),
}
needs_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# What a test waits for at most where ranks are left alone: NCCL's watchdog looks now and then.
LEFT_ALONE, TIMEOUT = 100.0, 12.0


def bench_of(op: str) -> Any:
    return importlib.import_module(f"cake.{op}.bench")


def inputs_of(op: str, bounds: tuple[int, ...]) -> Any:
    shape = Shape("pack-free", (2, 4) if op == "gdn" else (3, 3), tuple(b - a for a, b in pairwise(bounds)))
    return bench_of(op).inputs(shape, torch.device("cpu"), 0)


@cache
def truth_of(op: str, bounds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = bench_of(op).BENCH.reference(inputs_of(op, bounds))
    return found


def local_call(op: str, bounds: tuple[int, ...], group: Any, how: dict[str, Any]) -> Any:
    """A rank's context, the inputs that it holds, and a function that makes the call."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    whole = inputs_of(op, bounds)
    context = build_kcp_context(bounds, group, device=device, **how)
    local = _shard(whole, context)
    for name, x in local.tensors.items():
        local.tensors[name] = x.detach().to(device).requires_grad_(x.requires_grad)
    local.output_gradients = tuple(x.to(device) for x in local.output_gradients)
    return context, local, bench_of(op)._cake_under(context, "")


def results_of(o: torch.Tensor, local: Any) -> dict[str, torch.Tensor]:
    named = dict(zip(local.leaves, gradients(o, local), strict=True))
    return {"o": o.detach().cpu(), **{f"d{name}": x.cpu() for name, x in named.items()}}


def gradients(o: torch.Tensor, local: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(o, list(local.leaves.values()), local.output_gradients[0])


def settle() -> None:
    """Waits for the GPU: what went wrong there is raised here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# ---- what ranks run -----------------------------------------------------------------------------------


def plain(group: Any, op: str, bounds: tuple[int, ...], how: dict[str, Any], options: dict[str, Any]) -> Any:
    from cake.core import config

    context, local, call = local_call(op, bounds, group, how)
    with config.temporary(linear_attention_backend="cake", **{f"cake_{op}_variant": "det", **options}):
        (o,) = call(local)
        return results_of(o, local), context.fragments


def forward_alone(group: Any, op: str, bounds: tuple[int, ...]) -> torch.Tensor:
    _, local, call = local_call(op, bounds, group, {})
    with torch.no_grad():
        return call(local)[0].cpu()


def checkpointed(group: Any, op: str, bounds: tuple[int, ...], reentrant: bool, who: tuple[int, ...]) -> Any:
    """A call inside a checkpoint on the ranks `who`, and how many exchanges it took."""
    context, local, call = local_call(op, bounds, group, {})
    starts = []
    keep = _exchange.Exchange.start

    def start(self: Any) -> None:
        starts.append(1)
        keep(self)

    def layer(*values: torch.Tensor) -> torch.Tensor:
        local.tensors |= dict(zip(names, values, strict=True))
        return call(local)[0]

    names, leaves = list(local.leaves), list(local.leaves.values())
    with pytest.MonkeyPatch().context() as change:
        change.setattr(_exchange.Exchange, "start", start)
        inside = context.rank in who
        o = checkpoint(layer, *leaves, use_reentrant=reentrant) if inside else layer(*leaves)
        o.backward(local.output_gradients[0])
    settle()
    grads = {f"d{name}": x.grad.cpu() for name, x in zip(names, leaves, strict=True)}
    return {"o": o.detach().cpu(), **grads}, len(starts)


def interleaved(group: Any, op: str, packs: list[tuple[int, ...]], order: tuple[int, ...]) -> Any:
    """All forwards, then all backwards in the given order, on a stream of their own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        calls = [local_call(op, bounds, group, {"layout": "zigzag"}) for bounds in packs]
        outputs = [call(local)[0] for _, local, call in calls]
        return {i: results_of(outputs[i], calls[i][1]) for i in order}


def killed(group: Any, op: str, bounds: tuple[int, ...], rank: int) -> None:
    """Rank `rank` dies between its forward and its backward."""
    import os
    import signal

    context, local, call = local_call(op, bounds, group, {})
    (o,) = call(local)
    settle()
    if context.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    gradients(o, local)
    settle()


def absent(group: Any, op: str, bounds: tuple[int, ...], rank: int) -> str:
    """Rank `rank` doesn't make the second call. The first connects the ranks: NCCL sets that no limit."""
    context, local, call = local_call(op, bounds, group, {})
    call(local)
    settle()
    if context.rank == rank:
        return "absent"
    call(local)
    settle()
    return "came back"


def under_fla(group: Any, op: str, bounds: tuple[int, ...], layout: str, variant: str) -> Any:
    """Under flash-linear-attention's own context."""
    from cake.core import config

    context, local, _ = local_call(op, bounds, group, {"layout": layout})
    theirs = fla_context(context, layout)
    with config.temporary(linear_attention_backend="cake", **{f"cake_{op}_variant": variant}):
        o = public(op, theirs, local)
    return results_of(o, local), context.fragments


def fla_itself(group: Any, op: str, bounds: tuple[int, ...], layout: str) -> Any:
    """Outputs of flash-linear-attention's own kernels under its own context, and cake's under the same."""
    context, local, _ = local_call(op, bounds, group, {"layout": layout})
    theirs = fla_context(context, layout)
    with torch.no_grad():
        ours = public(op, theirs, local)
        call = bench_of(op)._fla_under(context, layout)
        return ours.cpu(), call(local)[0].cpu()


def public(op: str, context: Any, local: Any) -> torch.Tensor:
    """The public function, which takes contexts of either kind."""
    bench = bench_of(op)
    if op == "gdn":
        from cake.gdn import chunk_gated_delta_rule

        return bench._under(chunk_gated_delta_rule, context, local)[0]
    from cake.kda import chunk_kda

    return bench._call(chunk_kda, local, cp_context=context)[0]


# ---- tests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl") as pool:
        yield pool


def assert_accurate(op: str, bounds: tuple[int, ...], parts: Any) -> None:
    """Every rank's and every head's share by itself against the FP64 recurrence over the whole pack."""
    for name, true in truth_of(op, bounds).items():
        name = "o" if name == "output0" else name
        shares = [results[name].double() for results, _ in parts]
        if true.shape[:2] != (1, bounds[-1]):
            # A parameter's: a sum over all tokens, whose terms mostly cancel.
            assert relative_error(sum(shares), true) < 2e-2, name
            continue
        # Under slow decay dg is nearly one sum for all tokens, and so is its error.
        limit = 2e-2 if name == "dg" else 1e-2
        for rank, (share, (_, fragments)) in enumerate(zip(shares, parts, strict=True)):
            if not fragments:
                assert share.shape[1] == 0
                continue
            own = torch.cat([true[:, start:end] for start, end in fragments], dim=1)
            assert own.shape == share.shape
            for head in range(own.shape[2]):
                error = relative_error(share[:, :, head], own[:, :, head])
                assert error < limit, f"{name} of rank {rank}, head {head}: {error}"


def assert_same(parts: Any, expected: Any) -> None:
    for (got, *_), (true, *_) in zip(parts, expected, strict=True):
        assert set(got) == set(true)
        for name, x in true.items():
            assert_bitwise_equal(name, got[name], x)


class TestNobodyWaitsForEver:
    """Each with ranks of its own, since they don't live on. NCCL ends a process whose collective is late.

    They come first: they wait more than they work, and may do so beside others. Both ops have one exchange.
    """

    pytestmark = needs_two_gpus

    @pytest.fixture
    def pool(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
        monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # it would take longer than the rest
        with Ranks(2, backend="nccl", timeout=TIMEOUT) as pool:
            yield pool

    @pytest.mark.parametrize(("job", "op"), [(killed, "gdn"), (absent, "kda")], ids=["dies", "is absent"])
    def test_a_rank_that_dies_or_does_not_come_ends_the_other(self, pool: Ranks, op: str, job: Any) -> None:
        start = time.monotonic()
        mine, other = pool.run(job, op, PACKS["one document"], 1)
        assert time.monotonic() - start < LEFT_ALONE
        assert mine.gone or mine.error is not None
        assert other.gone if job is killed else other.value == "absent"

    @pytest.mark.parametrize(("op", "reentrant"), [("gdn", False), ("kda", True)])
    def test_a_replay_on_one_rank_only_is_an_error(self, pool: Ranks, op: str, reentrant: bool) -> None:
        start = time.monotonic()
        outcomes = pool.run(checkpointed, op, PACKS["one document"], reentrant, (1,))
        assert time.monotonic() - start < LEFT_ALONE
        assert all(outcome.gone or outcome.error is not None for outcome in outcomes)


@pytest.mark.parametrize("op", OPS)
class TestTwoGpus:
    pytestmark = needs_two_gpus

    @pytest.mark.parametrize("pack", PACKS)
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_accuracy(self, ranks: Ranks, op: str, layout: str, pack: str) -> None:
        parts = ranks.values(plain, op, PACKS[pack], {"layout": layout}, {})
        assert_accurate(op, PACKS[pack], parts)

    def test_a_rank_without_tokens(self, ranks: Ranks, op: str) -> None:
        how = {"fragments": [[(0, 1400)], []]}
        assert_accurate(op, PACKS["one document"], ranks.values(plain, op, PACKS["one document"], how, {}))

    def test_bits_from_run_to_run_saved_or_recomputed_or_checkpointed(self, ranks: Ranks, op: str) -> None:
        bounds = PACKS["short ones"]
        expected = ranks.values(plain, op, bounds, {}, {})
        for options in ({}, {f"cake_{op}_recompute_state": True}):
            assert_same(ranks.values(plain, op, bounds, {}, options), expected)
        for reentrant in (True, False):
            replayed = ranks.values(checkpointed, op, bounds, reentrant, (0, 1))
            assert_same(replayed, expected)
            assert [starts for _, starts in replayed] == [3, 3]
        for o, (results, _) in zip(ranks.values(forward_alone, op, bounds), expected, strict=True):
            assert_bitwise_equal("o", o, results["o"])
        with Ranks(2, backend="nccl") as others:  # other processes
            assert_same(others.values(plain, op, bounds, {}, {}), expected)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["in order", "in another"])
    def test_interleaved_micro_batches(self, ranks: Ranks, op: str, order: tuple[int, ...]) -> None:
        packs = list(PACKS.values())
        mixed = ranks.values(interleaved, op, packs, order)
        for i, bounds in enumerate(packs):
            apart = ranks.values(plain, op, bounds, {"layout": "zigzag"}, {})
            assert_same([(results[i],) for results in mixed], apart)

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_contexts_of_flash_linear_attention(self, ranks: Ranks, op: str, layout: str) -> None:
        pytest.importorskip("fla.ops.cp", reason="flash-linear-attention isn't installed")
        bounds = PACKS["short ones"]
        det, fast = (ranks.values(under_fla, op, bounds, layout, variant) for variant in ("det", "fast"))
        assert_accurate(op, bounds, det)
        assert_same(fast, det)

    @pytest.mark.slow  # Triton compiles and tunes for minutes
    def test_outputs_of_flash_linear_attention_itself(self, ranks: Ranks, op: str) -> None:
        pytest.importorskip("fla.ops.cp", reason="flash-linear-attention isn't installed")
        for ours, theirs in ranks.values(fla_itself, op, PACKS["short ones"], "contiguous"):
            assert relative_error(ours, theirs) < 1e-2
