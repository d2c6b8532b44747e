"""What ``cake verify gdn`` proves: the gates that real models have, and the inputs that break kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import softplus

from cake.core.verify import Case, Given, Verify
from cake.gdn import reference
from cake.gdn.plan import HEAD_DIM
from cake.gdn.spec import SPEC

__all__ = ["VERIFY"]

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
}
# A row of keys that repeats makes the chunk's inverse as bad as it gets.
REPEATED = {"o": 1e-2, "final_state": 9e-3, "dq": 1e-2, "dk": 1e-2, "dv": 1e-2, "dg": 1e-2, "dbeta": 2e-2}
# A state that forgets nothing keeps every token's roundings.
SLOW = {"final_state": 5e-3}
# Where gates are so strong that the true gradient is next to nothing, its error counts against ordinary ones.
ORDINARY = {"dg": 0.02, "final_state": 1e-30, "dinitial_state": 1e-30}


def make(
    device: torch.device,
    seed: int,
    *,
    lengths: Sequence[int],
    heads: tuple[int, int] = (1, 2),
    gate: str = "model",
    repeat_keys: int = 1,
    state: bool = True,
    fused: bool = False,
) -> Given:
    """A call on packed sequences, the same values on every device.

    gate: "model", -A softplus(a + 1) with A uniform in (0, 16) per head, as Qwen3-Next starts; "slow", decays
        within 1e-4 of 1; "none", g = 0 and beta = 1; "total", a third of the tokens at -40, one third at 0.
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
    noise, rates = normal(1, tokens, hv), 16 * torch.rand(hv, generator=random)
    beta = torch.rand(1, tokens, hv, generator=random)
    if gate == "slow":
        g = -1e-4 * noise.abs()
    elif gate == "none":
        g, beta = torch.zeros_like(noise), torch.ones_like(beta)
    elif gate == "total":
        g = torch.where(noise > 0.4, 0.0, torch.where(noise < -0.4, -40.0, -softplus(noise)))
    else:
        g = -rates * softplus(noise + 1)
    parts = torch.split(qkv, [h, h, hv], dim=2)
    tensors = dict(zip("qkv", parts if fused else (x.clone() for x in parts), strict=True))
    tensors |= {"g": g.to(device), "beta": beta.to(device)}
    if state:
        tensors["initial_state"] = (0.1 * normal(n, hv, HEAD_DIM, HEAD_DIM)).to(device)
    for x in tensors.values():
        x.requires_grad_()
    loss = {"o": normal(1, tokens, hv, HEAD_DIM).bfloat16().to(device)}
    if state:
        loss["final_state"] = (0.02 * normal(n, hv, HEAD_DIM, HEAD_DIM)).to(device)
    boundaries = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    return Given(tensors, loss, boundaries=boundaries)


def call(given: Given, variant: str, tape: str) -> dict[str, torch.Tensor]:
    """The op as training frameworks call it."""
    from cake.gdn import chunk_gated_delta_rule

    tensors: dict[str, Any] = given.tensors
    o, final_state = chunk_gated_delta_rule(
        **tensors,
        use_qk_l2norm_in_kernel=True,
        output_final_state="final_state" in given.loss,
        cu_seqlens_cpu=given.boundaries,
        variant=variant,
        recompute_state=tape == "recomputed",
        **given.arguments,
    )
    return {"o": o} if final_state is None else {"o": o, "final_state": final_state}


def truth(given: Given) -> Mapping[str, torch.Tensor]:
    """The recurrence in FP64, token by token."""
    inputs: dict[str, Any] = {name: x.detach() for name, x in given.tensors.items()}
    o, final_state = reference.forward(**inputs, boundaries=given.boundaries)
    grads = reference.backward(
        **inputs, do=given.loss["o"], dht=given.loss.get("final_state"), boundaries=given.boundaries
    )
    found = {"o": o, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dg": grads.dg, "dbeta": grads.dbeta}
    if "initial_state" in inputs:
        found |= {"final_state": final_state, "dinitial_state": grads.dh0}
    return found


VERIFY = Verify(
    op=SPEC.name,
    cases=(
        Case(
            "Qwen gates",
            partial(make, lengths=(300, 64, 200), heads=(2, 4)),
            least_rms=ORDINARY,
            bits=True,
        ),
        Case(
            "cut document",
            partial(make, lengths=(1300,), heads=(1, 1)),
            least_rms=ORDINARY,
            bits=True,
        ),
        Case("slow decay", partial(make, lengths=(500,), gate="slow"), limits=SLOW),
        Case("no and total decay", partial(make, lengths=(300, 70), gate="total"), least_rms=ORDINARY),
        Case(
            "no decay and repeated keys",
            partial(make, lengths=(256,), gate="none", repeat_keys=8, state=False),
            limits=REPEATED,
        ),
        Case("lengths around a chunk", partial(make, lengths=(1, 63, 64, 65, 2, 127, 0, 129), gate="slow")),
        Case(
            "views of a projection",
            partial(make, lengths=(130, 70), heads=(1, 3), state=False, fused=True),
            least_rms=ORDINARY,
            bits=True,
        ),
    ),
    call=call,
    reference=truth,
    limits=LIMITS,
    states=("final_state", "dinitial_state"),
    tapes=("saved", "recomputed"),
)
