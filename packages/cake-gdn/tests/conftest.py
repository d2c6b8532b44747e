"""What the tests of cake-gdn share: the device, random calls of the op, and what to compare them with.

Tests that take `device` run on the CPU, and marked gpu on CUDA: the twins and the kernels pass the same ones.
The tests of what every op promises, tests/ops of the repository, use the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from cake.core import config, env
from cake.core.calls import Memo
from cake.core.testing.markers import pytest_configure, pytest_runtest_setup
from cake.gdn import api, chunk_gated_delta_rule, reference

__all__ = ["pytest_configure", "pytest_runtest_setup"]

# What a forward may keep for its backward, beside the inputs.
TAPES: dict[str, dict[str, Any]] = {
    "states": {},
    "inputs": {"recompute_state": True},
}
KEPT = ("CAKE_CACHE_DIR", "CAKE_CACHE_READONLY_DIRS", "CAKE_NVCC")  # where compiled kernels come from
# Half the RMS of dg at ordinary gates and loss gradients of unit variance: where a gate is so strong that the
# true dg is next to nothing, its error is judged against this.
ORDINARY_DG = 0.02


@dataclass(frozen=True)
class Case:
    """The tensors of one call, and of a loss ``(o * do).sum() + (ht * dht).sum()`` on its results."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    do: torch.Tensor | None
    dht: torch.Tensor | None
    boundaries: tuple[int, ...] | None
    l2norm: bool = True
    scale: float | None = None

    def replace(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The inputs by name."""
        names = ("q", "k", "v", "g", "beta", "initial_state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """The case with every tensor changed."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: change(x) for n, x in values.items() if isinstance(x, torch.Tensor)})


def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration leaks into a test, or out of one, and no plan of another one's calls."""
    monkeypatch.setattr(api, "_calls", Memo())
    for variable in env.VARIABLES:
        if variable.name.startswith("CAKE_") and variable.name not in KEPT:
            monkeypatch.delenv(variable.name, raising=False)
    config.reset()
    yield
    config.reset()


def make_case(
    device: torch.device,
    lengths: Sequence[int] = (100,),
    heads: tuple[int, int] = (1, 2),
    *,
    batch: int | None = None,
    gate: str | float = "ordinary",
    beta: str | float = "uniform",
    keys: str = "random",
    state: bool = True,
    beta_dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype = torch.float32,
    l2norm: bool = True,
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    """A random case on the device; the same arguments give the same values on every device."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    rows, tokens, n = (1, sum(lengths), len(lengths)) if batch is None else (batch, lengths[0], batch)
    h, hv = heads
    q, k = normal(rows, tokens, h, 128), normal(rows, tokens, h, 128)
    v, do = normal(rows, tokens, hv, 128), normal(rows, tokens, hv, 128)
    if not l2norm:
        q, k = q * 128**-0.5, k * 128**-0.5
    if keys == "repeated":
        k = k[:, :1].expand_as(k)
    elif keys == "repeated 8 times":
        k = k[:, torch.arange(tokens) // 8 * 8]
    initial, dht = 0.1 * normal(n, hv, 128, 128), 0.02 * normal(n, hv, 128, 128)
    case = Case(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=v.bfloat16(),
        g=_gate(gate, normal(rows, tokens, hv), torch.rand(hv, generator=random)).to(g_dtype),
        beta=_beta(beta, torch.rand(rows, tokens, hv, generator=random)).to(beta_dtype),
        initial_state=initial if state else None,
        do=do.bfloat16(),
        dht=dht if state else None,
        boundaries=None if batch else tuple(torch.tensor([0, *lengths]).cumsum(0).tolist()),
        l2norm=l2norm,
        scale=scale,
    )
    return case.map(lambda x: x.to(device))


def _gate(kind: str | float, noise: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    if kind == "ordinary":
        return -softplus(noise)
    if kind == "model":  # A uniform in (0, 16) as Qwen3-Next starts, dt_bias 1: g reaches about -40
        return -16 * uniform * softplus(noise + 1)
    if kind == "bounded":  # a lower bound of -5
        return -5 * noise.sigmoid()
    if kind == "slow":
        return -1e-4 * noise.abs()
    if kind == "mixed":  # none, ordinary and total decay side by side
        return torch.where(noise > 0.7, 0.0, torch.where(noise < -0.7, -40.0, -softplus(noise)))
    return torch.full_like(noise, float(kind))


def _beta(kind: str | float, uniform: torch.Tensor) -> torch.Tensor:
    if kind == "uniform":
        return uniform
    if kind == "half ones":
        return torch.where(uniform > 0.5, 1.0, uniform)
    if kind == "zeros and ones":
        return (uniform > 0.5).float()
    return torch.full_like(uniform, float(kind))


def run_case(case: Case, *, final: bool | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Runs the op on a case, forward and backward, and returns results and gradients by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in case.tensors().items()}
    final = case.dht is not None if final is None else final
    if case.boundaries is not None and "cu_seqlens" not in arguments:
        arguments.setdefault("cu_seqlens_cpu", case.boundaries)
    o, ht = chunk_gated_delta_rule(
        **inputs,
        scale=case.scale,
        output_final_state=final,
        use_qk_l2norm_in_kernel=case.l2norm,
        **arguments,
    )
    outputs = [(x, grad) for x, grad in ((o, case.do), (ht, case.dht)) if grad is not None and x is not None]
    gradients = torch.autograd.grad(
        [x for x, _ in outputs], list(inputs.values()), [grad for _, grad in outputs]
    )
    results = {"o": o.detach()} | ({} if ht is None else {"ht": ht.detach()})
    names = {"initial_state": "dh0"}
    return results | {names.get(name, f"d{name}"): x for name, x in zip(inputs, gradients, strict=True)}


def true_results(case: Case) -> dict[str, torch.Tensor]:
    """What `run_case` should return, from the FP64 recurrence."""
    inputs = (case.q, case.k, case.v, case.g, case.beta)
    how: dict[str, Any] = {
        "scale": case.scale,
        "initial_state": case.initial_state,
        "use_qk_l2norm": case.l2norm,
        "boundaries": case.boundaries,
    }
    o, ht = reference.forward(*inputs, **how)
    gradients = reference.backward(*inputs, case.do, case.dht, **how)
    results = {"o": o, "ht": ht} | {f.name: getattr(gradients, f.name) for f in fields(gradients)}
    if case.initial_state is None:
        del results["dh0"]
    return results


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from unconfigured(monkeypatch)


@pytest.fixture
def make(device: torch.device) -> Callable[..., Case]:
    return partial(make_case, device)


@pytest.fixture
def call() -> Callable[..., dict[str, torch.Tensor]]:
    return run_case


@pytest.fixture
def truth() -> Callable[[Case], dict[str, torch.Tensor]]:
    return true_results
