"""What ``cake verify kda`` proves: the gates that real models have, and the inputs that break kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import softplus

from cake.core.verify import Case, Given, Verify
from cake.kda import reference
from cake.kda.spec import SPEC

__all__ = ["VERIFY"]

HEAD_DIM = 128
MIN_LOG_DECAY = -88.0
# Of bf16 operands with fp32 sums: bf16 storage of a result alone costs 1.7e-3.
LIMITS = {
    "o": 5e-3,
    "final_state": 4e-3,
    "dq": 6e-3,
    "dk": 6e-3,
    "dv": 6e-3,
    "dg": 6e-3,
    "dbeta": 6e-3,
    "dinitial_state": 4e-3,
    # Sums over tokens of both signs, small by chance now and then.
    "dA_log": 2e-2,
    "ddt_bias": 1.2e-2,
}
# A row of keys that repeats makes the chunk's inverse as bad as it gets.
REPEATED = {"o": 1e-2, "final_state": 9e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "dg": 1e-2, "dbeta": 2e-2}
# A state that forgets nothing keeps every token's roundings.
SLOW = {"final_state": 5e-3}
# Where gates are so strong that the true gradient is next to nothing, its error counts against ordinary ones.
ORDINARY = {"dg": 1.5e-3, "final_state": 1e-30, "dinitial_state": 1e-30}


def make(
    device: torch.device,
    seed: int,
    *,
    lengths: Sequence[int],
    heads: tuple[int, int] = (1, 2),
    gate: str = "ordinary",
    repeat_keys: int = 1,
    state: bool = True,
    fused: bool = False,
    lower_bound: float | None = None,
) -> Given:
    """A call on packed sequences, the same values on every device.

    gate: "ordinary", -softplus(a); "slow", decays within 1e-4 of 1; "none", g = 0 and beta = 1; "total", a
        third of the channels at -40, one third at 0; "raw", made in the call, with `lower_bound` if any.
    repeat_keys: tokens in a row that share a key.
    fused: q, k and v are views of one tensor.
    """
    random = torch.Generator().manual_seed(seed)
    h, hv = heads
    tokens, n = sum(lengths), len(lengths)
    normal = partial(torch.randn, generator=random)
    qkv = normal(1, tokens, 2 * h + hv, HEAD_DIM)
    if repeat_keys > 1:
        qkv[:, :, h : 2 * h] = qkv[:, torch.arange(tokens) // repeat_keys * repeat_keys, h : 2 * h]
    qkv = qkv.bfloat16().to(device)
    noise = normal(1, tokens, hv, HEAD_DIM)
    beta = torch.rand(1, tokens, hv, generator=random)
    parts = torch.split(qkv, [h, h, hv], dim=2)
    tensors = dict(zip("qkv", parts if fused else (x.clone() for x in parts), strict=True))
    arguments: dict[str, Any] = {}
    if gate == "slow":
        g = -1e-4 * noise.abs()
    elif gate == "none":
        g, beta = torch.zeros_like(noise), torch.ones_like(beta)
    elif gate == "total":
        g = torch.where(noise > 0.4, 0.0, torch.where(noise < -0.4, -40.0, -softplus(noise)))
    elif gate == "raw":
        g = noise
        tensors["A_log"] = torch.rand(hv, generator=random).to(device)
        tensors["dt_bias"] = normal(hv * HEAD_DIM).to(device)
        arguments = {"use_gate_in_kernel": True, "lower_bound": lower_bound}
    else:
        g = -softplus(noise)
    tensors |= {"g": g.to(device), "beta": beta.to(device)}
    if state:
        tensors["initial_state"] = (0.1 * normal(n, hv, HEAD_DIM, HEAD_DIM)).to(device)
    for x in tensors.values():
        x.requires_grad_()
    loss = {"o": normal(1, tokens, hv, HEAD_DIM).bfloat16().to(device)}
    if state:
        loss["final_state"] = (0.02 * normal(n, hv, HEAD_DIM, HEAD_DIM)).to(device)
    boundaries = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    return Given(tensors, loss, arguments=arguments, boundaries=boundaries)


def call(given: Given, variant: str, tape: str) -> dict[str, torch.Tensor]:
    """The op as training frameworks call it."""
    from cake.kda import chunk_kda

    tensors: dict[str, Any] = given.tensors
    o, final_state = chunk_kda(
        **tensors,
        use_qk_l2norm_in_kernel=True,
        output_final_state="final_state" in given.loss,
        cu_seqlens_cpu=given.boundaries,
        variant=variant,
        recompute_state=tape == "recomputed",
        disable_recompute=tape == "all saved",
        **given.arguments,
    )
    return {"o": o} if final_state is None else {"o": o, "final_state": final_state}


def truth(given: Given) -> Mapping[str, torch.Tensor]:
    """The recurrence in FP64, token by token."""
    inputs: dict[str, Any] = {name: x.detach() for name, x in given.tensors.items()}
    gate = {
        name: inputs.pop(name).double().requires_grad_() for name in ("A_log", "dt_bias") if name in inputs
    }
    if gate:
        raw = inputs["g"].double().requires_grad_()
        with torch.enable_grad():
            log_decay = _gate(raw, gate["A_log"], gate["dt_bias"], given.arguments["lower_bound"])
        inputs["g"] = log_decay.detach()
    o, final_state = reference.forward(**inputs, boundaries=given.boundaries)
    grads = reference.backward(
        **inputs, do=given.loss["o"], dht=given.loss.get("final_state"), boundaries=given.boundaries
    )
    found = {"o": o, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dg": grads.dg, "dbeta": grads.dbeta}
    if gate:
        found["dg"], found["dA_log"], found["ddt_bias"] = torch.autograd.grad(
            log_decay, [raw, gate["A_log"], gate["dt_bias"]], grads.dg
        )
    if "initial_state" in inputs:
        found |= {"final_state": final_state, "dinitial_state": grads.dh0}
    return found


def _gate(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, bound: float | None) -> torch.Tensor:
    x = raw + dt_bias.view(-1, HEAD_DIM)
    rate = a_log.exp()[:, None]
    g = -rate * softplus(x) if bound is None else bound * (rate * x).sigmoid()
    return g.clamp_min(MIN_LOG_DECAY)


VERIFY = Verify(
    op=SPEC.name,
    cases=(
        Case(
            "raw gate",
            partial(make, lengths=(150, 64, 70), heads=(2, 2), gate="raw"),
            bits=True,
        ),
        Case("bounded raw gate", partial(make, lengths=(200,), gate="raw", lower_bound=-5.0), bits=True),
        Case("slow decay", partial(make, lengths=(400,), gate="slow"), limits=SLOW),
        Case(
            "no and total decay",
            partial(make, lengths=(200, 70), gate="total"),
            least_rms=ORDINARY,
        ),
        Case(
            "no decay and repeated keys",
            partial(make, lengths=(256,), gate="none", repeat_keys=8, state=False),
            limits=REPEATED,
        ),
        Case("lengths around a chunk", partial(make, lengths=(1, 63, 64, 65, 2, 127, 0, 129), gate="slow")),
        Case(
            "views of a projection",
            partial(make, lengths=(130, 70), heads=(1, 3), state=False, fused=True),
            bits=True,
        ),
    ),
    call=call,
    reference=truth,
    limits=LIMITS,
    states=("final_state", "dinitial_state"),
    whole=("dA_log", "ddt_bias"),
    tapes=("saved", "recomputed", "all saved"),
)
