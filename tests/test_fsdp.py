"""A layer under FSDP2: sharded parameters and checkpoints around the op, and the losses of a whole layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cake.core.testing import Ranks

STEPS = 3


class Layer(torch.nn.Module):
    """One linear-attention layer with its projections, as models have it."""

    def __init__(self, op: str, checkpointed: bool) -> None:
        super().__init__()
        self.op, self.checkpointed = op, checkpointed
        self.into = torch.nn.Linear(32, 4 * 128)
        self.gates = torch.nn.Linear(32, 4 if op == "gdn" else 2 + 2 * 128)
        self.out = torch.nn.Linear(2 * 128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.mix, x, use_reentrant=False)
        return self.mix(x)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        import cake.gdn
        import cake.kda

        tokens = x.shape[1]
        q, k, v = self.into(x).bfloat16().split([128, 128, 256], dim=-1)
        q, k, v = (y.view(1, tokens, -1, 128) for y in (q, k, v))
        beta, raw = self.gates(x).float().split([2, self.gates.out_features - 2], dim=-1)
        g = torch.nn.functional.logsigmoid(raw)
        function = cake.gdn.chunk_gated_delta_rule
        if self.op == "kda":
            function, g = cake.kda.chunk_kda, g.view(1, tokens, 2, 128)
        boundaries = [0, 30, tokens]
        o, _ = function(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True, cu_seqlens_cpu=boundaries)
        return x + self.out(o.to(x.dtype).flatten(2))


def train(group: Any, op: str, checkpointed: bool, shard: bool, device: str) -> list[float]:
    """Losses of a few steps; every rank has the same data, so that sharding changes no value."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(op, checkpointed), Layer(op, checkpointed)).to(device)
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=TWO_GPUS)])
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, Ranks]]:
    with Ranks(2, backend=request.param) as pool:
        yield "cuda" if request.param == "nccl" else "cpu", pool


@pytest.mark.parametrize(
    ("op", "checkpointed"),
    [
        ("gdn", True),
        ("kda", False),
        pytest.param("gdn", False, marks=pytest.mark.gpu),
        pytest.param("kda", True, marks=pytest.mark.gpu),
    ],
)
def test_a_sharded_layer_trains_as_a_whole_one(ranks: tuple[str, Ranks], op: str, checkpointed: bool) -> None:
    device, pool = ranks
    whole = train(None, op, False, False, device)
    for losses in pool.values(train, op, checkpointed, True, device):
        assert losses == pytest.approx(whole, rel=1e-6 if device == "cpu" else 1e-4)
    assert whole[-1] < whole[0]
