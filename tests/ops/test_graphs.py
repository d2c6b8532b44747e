"""CUDA graphs of a forward and backward: captured once, replayed with new contents, bits as of eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cake.core.testing import assert_bitwise_equal

NAMES = ("q", "k", "v", "g", "beta")
# One long sequence beside many short ones: blocks that finish at very different times.
UNEVEN = (512, *[6] * 48)
CUT = (6000, 150, 2500)


def step(op: Any, tensors: dict[str, torch.Tensor], do: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    o, _ = op.chunk(**tensors, use_qk_l2norm_in_kernel=True, **arguments)
    return [o.detach(), *torch.autograd.grad(o, list(tensors.values()), do)]


def capture(
    op: Any, tensors: dict[str, torch.Tensor], do: torch.Tensor, **arguments: Any
) -> tuple[Any, list[torch.Tensor]]:
    """A graph of `step`, and the results that every replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(op, tensors, do, **arguments)  # loads the kernels, which a capture can't
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(op, tensors, do, **arguments)
    return graph, results


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("boundaries", ["device", "host", "batch", "device, cut", "host, cut"])
def test_replays_have_the_bits_of_eager_calls(op: Any, make: Any, boundaries: str, recompute: bool) -> None:
    # Few heads and long sequences are cut into segments, which takes all kernels.
    lengths: Sequence[int] = {"batch": (300,), "device, cut": CUT, "host, cut": CUT}.get(boundaries, UNEVEN)
    case = make(lengths, (1, 2), batch=2 if boundaries == "batch" else None, state=False)
    arguments: dict[str, Any] = {"recompute_state": recompute}
    if boundaries.startswith("device"):
        arguments["cu_seqlens"] = torch.tensor(case.boundaries, device=case.q.device)
    elif boundaries.startswith("host"):
        arguments["cu_seqlens_cpu"] = case.boundaries
    tensors = {name: getattr(case, name).requires_grad_() for name in NAMES}
    graph, results = capture(op, tensors, case.do, **arguments)
    for replay in range(1000):
        with torch.no_grad():
            for name in ("q", "k", "v"):
                tensors[name].normal_()
            tensors["g"].uniform_(-2.0, 0.0)
            tensors["beta"].uniform_()
            case.do.normal_()
        graph.replay()
        if replay % 100 == 99:
            fresh = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
            for name, found, true in zip(
                ("o", *NAMES), results, step(op, fresh, case.do, **arguments), strict=True
            ):
                assert_bitwise_equal(name, found, true)


@pytest.mark.gpu
@pytest.mark.parametrize("device", [torch.device("cuda", 0)], ids=["cuda"])
def test_boundaries_on_the_device_may_change_between_replays(op: Any, make: Any) -> None:
    case = make(UNEVEN, (1, 2), state=False)
    tensors = {name: getattr(case, name).requires_grad_() for name in NAMES}
    cu_seqlens = torch.tensor(case.boundaries, device=case.q.device)
    graph, results = capture(op, tensors, case.do, cu_seqlens=cu_seqlens)
    total, n = case.boundaries[-1], len(case.boundaries)
    for seed in range(5):
        cuts = torch.randint(0, total + 1, (n - 2,), generator=torch.Generator().manual_seed(seed))
        new = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([total])])
        cu_seqlens.copy_(new)
        graph.replay()
        for name, found, true in zip(
            ("o", *NAMES), results, step(op, tensors, case.do, cu_seqlens=cu_seqlens.clone()), strict=True
        ):
            assert_bitwise_equal(name, found, true)
