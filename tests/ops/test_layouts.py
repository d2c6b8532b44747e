"""Gradients of a projection's parts are written where its own gradient lies, and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from cake.core import split_projection
from cake.core.testing import assert_bitwise_equal, permuted_view

NAMES = ("q", "k", "v")


def projected(
    case: Any, *more: str, order: tuple[int, ...] = (0, 1, 2)
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A leaf that holds q, k, v and `more` of a case side by side, and views of it with a graph between."""
    parts = {name: getattr(case, name) for name in (*NAMES, *more)}
    columns = torch.cat([x.flatten(2) for x in parts.values()], -1)
    leaf = permuted_view(columns, order).requires_grad_()
    views = split_projection(leaf.view_as(leaf), *[x.shape[2:] for x in parts.values()])
    return leaf, dict(zip(parts, views, strict=True))


@pytest.fixture
def run(op: Any) -> Callable[..., torch.Tensor]:
    def chunk(case: Any, given: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
        inputs = {name: x for name, x in case.tensors().items() if name != "initial_state"} | given
        o, _ = op.chunk(**inputs, use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=case.boundaries, **arguments)
        return o

    return chunk


def expected_of(call: Any, case: Any, *names: str) -> torch.Tensor:
    apart = call(case.replace(initial_state=None, dht=None))
    return torch.cat([apart[f"d{name}"].flatten(2) for name in names], -1)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("batch", [None, 2], ids=["pack", "batch"])
@pytest.mark.parametrize("heads", [(2, 4), (2, 2)], ids=["grouped", "repeated"])
def test_one_buffer(
    make: Any, call: Any, heads: tuple[int, int], batch: int | None, order: Any, run: Any
) -> None:
    case = make((70, 65) if batch is None else (70,), heads, batch=batch, state=False)
    leaf, views = projected(case, order=order)
    seen = {}
    for name, x in views.items():
        x.register_hook(lambda grad, name=name: seen.update({name: (grad.data_ptr(), grad.stride())}))
    run(case, views).backward(case.do)
    assert_bitwise_equal("the gradient", leaf.grad, expected_of(call, case, *NAMES))
    first = leaf.grad.data_ptr()
    for name, x in views.items():
        assert seen[name] == (first + x.data_ptr() - leaf.data_ptr(), x.stride())


@pytest.mark.parametrize("how", ["recomputed", "cut", "checkpoint", "offloaded", "by device boundaries"])
def test_however_it_runs(make: Any, call: Any, device: torch.device, how: str, run: Any) -> None:
    case = make((150, 65), (2, 4), state=False)
    arguments: dict[str, Any] = {}
    if how == "recomputed":
        arguments["recompute_state"] = True
    elif how == "cut":
        arguments["segments"] = 2
    elif how == "by device boundaries":
        arguments["cu_seqlens"] = torch.tensor(case.boundaries, device=device)
        case = case.replace(boundaries=None)
    plain = call(case.replace(initial_state=None, dht=None), **arguments)
    expected = torch.cat([plain[f"d{name}"].flatten(2) for name in NAMES], -1)
    leaf, views = projected(case)
    seen = []
    views["v"].register_hook(lambda grad: seen.append(grad.data_ptr()))
    if how == "checkpoint":
        o = checkpoint(
            lambda *x: run(case, dict(zip(NAMES, x, strict=True))), *views.values(), use_reentrant=False
        )
    elif how == "offloaded":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().cpu(), lambda x: x.to(device)):
            o = run(case, views)
    else:
        o = run(case, views, **arguments)
    o.backward(case.do)
    assert_bitwise_equal("the gradient", leaf.grad, expected)
    assert seen == [leaf.grad.data_ptr() + views["v"].data_ptr() - leaf.data_ptr()]


def test_gates_and_betas_of_the_same_projection(make: Any, call: Any, run: Any) -> None:
    case = make((70, 65), (2, 8), state=False, beta_dtype=torch.bfloat16, g_dtype=torch.bfloat16)
    leaf, views = projected(case, "g", "beta")
    seen = {}
    for name, x in views.items():
        x.register_hook(lambda grad, name=name: seen.update({name: grad.data_ptr()}))
    run(case, views).backward(case.do)
    assert_bitwise_equal("the gradient", leaf.grad, expected_of(call, case, *NAMES, "g", "beta"))
    at = {name: leaf.grad.data_ptr() + x.data_ptr() - leaf.data_ptr() for name, x in views.items()}
    assert seen == at


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)], ids=["heads first", "tokens first"])
def test_other_orders_of_axes(make: Any, call: Any, order: tuple[int, ...], run: Any) -> None:
    """The gradient of a leaf that fills its memory lies as the leaf does: autograd keeps it as it is."""
    case = make((70,), (2, 4), batch=2, state=False)
    expected = call(case)
    leaves = {name: permuted_view(getattr(case, name), order).requires_grad_() for name in NAMES}
    seen = {}
    for name, x in leaves.items():
        x.register_hook(lambda grad, name=name: seen.update({name: grad.data_ptr()}))
    run(case, leaves).backward(case.do)
    for name, x in leaves.items():
        assert_bitwise_equal(f"d{name}", x.grad, expected[f"d{name}"])
        assert x.grad.stride() == x.stride()
        assert x.grad.data_ptr() == seen[name]


def test_q_and_k_of_one_part(make: Any, call: Any, run: Any) -> None:
    case = make((70, 65), (2, 4), state=False)
    case = case.replace(k=case.q)
    leaf, views = projected(case)
    run(case, views | {"k": views["q"]}).backward(case.do)
    apart = call(case)
    expected = [apart["dq"] + apart["dk"], torch.zeros_like(case.k), apart["dv"]]
    assert_bitwise_equal("the gradient", leaf.grad, torch.cat([x.flatten(2) for x in expected], -1))


def test_without_tokens(make: Any, run: Any) -> None:
    case = make((0,), (2, 4), state=False)
    leaf, views = projected(case)
    run(case, views).backward(case.do)
    assert leaf.grad.shape == leaf.shape


def test_wanted_in_part(make: Any, call: Any, run: Any) -> None:
    case = make((70, 65), (2, 4), state=False)
    leaf, views = projected(case)
    views["k"] = views["k"].detach()
    run(case, views).backward(case.do)
    apart = call(case)
    expected = [apart["dq"], torch.zeros_like(apart["dk"]), apart["dv"]]
    assert_bitwise_equal("the gradient", leaf.grad, torch.cat([x.flatten(2) for x in expected], -1))


def test_compiled(make: Any, call: Any, run: Any) -> None:
    """The op's results share no memory there: the compiler's own split has the gradient."""
    case = make((70, 65), (2, 4), state=False)
    parts = [x.shape[2:] for x in (case.q, case.k, case.v)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: torch.Tensor) -> torch.Tensor:
        return run(case, dict(zip(NAMES, split_projection(2 * x, *parts), strict=True)))

    leaf = (torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], -1) / 2).requires_grad_()
    layer(leaf).backward(case.do)
    assert_bitwise_equal("the gradient", leaf.grad, 2 * expected_of(call, case, *NAMES))


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
def test_no_more_memory_than_with_torchs_split(make: Any, run: Any) -> None:
    case = make((3000, 2000), (2, 4), state=False)
    leaf, views = projected(case)
    parts = [x.shape[2:] for x in views.values()]
    del views

    def split_by_torch(x: torch.Tensor, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        views = torch.split(x, [n * m for n, m in shapes], -1)
        return [view.unflatten(-1, shape) for view, shape in zip(views, shapes, strict=True)]

    def peak(split: Any) -> int:
        leaf.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        run(case, dict(zip(NAMES, split(leaf.view_as(leaf), *parts), strict=True))).backward(case.do)
        torch.cuda.synchronize()
        # What was asked for: the blocks that the allocator finds may be larger, by up to a megabyte each.
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)

    for split in (split_projection, split_by_torch):
        peak(split)  # kernels, plans and tables
    assert peak(split_projection) <= peak(split_by_torch) + 4096


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 gates", "bf16 gates"])
def test_no_kernels_but_ours(make: Any, dtype: torch.dtype, run: Any) -> None:
    """Of a step from the projection to its gradient."""
    case = make((300, 200), (2, 4), state=False, beta_dtype=dtype, g_dtype=dtype)
    leaf, _ = projected(case)
    parts = [x.shape[2:] for x in (case.q, case.k, case.v)]
    g, beta = case.g.requires_grad_(), case.beta.requires_grad_()

    def step() -> None:
        views = dict(zip(NAMES, split_projection(leaf.view_as(leaf), *parts), strict=True))
        o = run(case, views | {"g": g, "beta": beta})
        leaf.grad = g.grad = beta.grad = None
        o.backward(case.do)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [x.name for x in seen.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels
    assert [name for name in kernels if "cake" not in name] == []
