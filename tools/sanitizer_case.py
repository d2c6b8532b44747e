"""A small case of every kernel, for compute-sanitizer: forwards and backwards that use every library.

tools/gpu_tests.py runs it; it needs a GPU. Lengths are ragged and one sequence is empty, so that partial
chunks, borders and the paths with and without states are all walked. Fails if a library that the op
declares was not used.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

import cake.core
from cake.core import loader, toolchain
from cake.gdn import chunk_gated_delta_rule
from cake.kda import chunk_kda

OPS = ("gdn", "kda")
LENGTHS = (1, 70, 0, 130, 64)
HEADS = ((1, 2), (2, 2))


def run(
    op: str, heads: int, value_heads: int, *, states: bool, in_kernel: bool, segments: int | None = None
) -> None:
    """One forward and backward; outputs are read so that nothing is optimised away."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_()

    total = sum(LENGTHS)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    channels = () if op == "gdn" else (128,)
    q, k = (normal(1, total, heads, 128, dtype=torch.bfloat16) for _ in range(2))
    v = normal(1, total, value_heads, 128, dtype=torch.bfloat16)
    g, beta = normal(1, total, value_heads, *channels), normal(1, total, value_heads)
    initial = normal(len(LENGTHS), value_heads, 128, 128) if states else None
    gates: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": in_kernel,
        "use_gate_in_kernel": in_kernel,
        "use_beta_sigmoid_in_kernel": in_kernel,
    }
    if in_kernel:
        gates |= {"A_log": normal(value_heads), "dt_bias": normal(value_heads, *channels)}
        if op == "kda" and states:
            gates["lower_bound"] = -5.0
    else:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        # From weak gates to what no bound would allow: each way of kda's pairs is walked.
        strength = torch.linspace(1, 60, total, device="cuda").view(1, -1, *[1] * (g.ndim - 2))
        g, beta = torch.nn.functional.logsigmoid(g) * strength, beta.sigmoid()
    bounds_at: dict[str, Any] = {"cu_seqlens": bounds.cuda()}
    if in_kernel or segments:
        bounds_at = {"cu_seqlens_cpu": bounds}
    if segments:
        bounds_at["segments"] = segments
    function = chunk_gated_delta_rule if op == "gdn" else chunk_kda
    o, final = function(
        q, k, v, g, beta, initial_state=initial, output_final_state=states, **gates, **bounds_at
    )
    loss = o.float().square().sum()
    if states:
        loss = loss + final.square().sum()
    loss.backward()
    torch.cuda.synchronize()
    if not bool(torch.isfinite(loss)):
        raise SystemExit("the case gave a loss that is not finite")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for recompute in (False, True):
        selection = {"linear_attention_backend": "cake"}
        for op in OPS:
            selection |= {f"cake_{op}_variant": "det", f"cake_{op}_recompute_state": recompute}
        cake.core.configure(selection)
        for op, (heads, value_heads) in itertools.product(OPS, HEADS):
            for states, in_kernel in itertools.product((False, True), repeat=2):
                run(op, heads, value_heads, states=states, in_kernel=in_kernel)
        # Maps may vanish with the norm in the kernel, without it none does.
        for op, in_kernel in itertools.product(OPS, (False, True)):
            run(op, *HEADS[0], states=True, in_kernel=in_kernel, segments=3)
    arch = toolchain.device_arch(torch.device("cuda"))
    declared = {record.library for op in OPS for _, record in loader.libraries(op, arch)}
    if missed := declared - {library.library for library in loader.loaded()}:
        raise SystemExit(f"no case used {', '.join(sorted(missed))}")
    print(f"every case ran; used {', '.join(sorted(declared))}")


if __name__ == "__main__":
    main()
