"""The declaration of the op; torch-free."""

from __future__ import annotations

from cake.core.spec import Flag, KernelPackage, OpSpec, Selection

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="kda",
    distribution="cake-kda",
    summary="Kimi Delta Attention: a gated delta rule with one decay per key channel (Kimi-Linear)",
    variants=("det", "fast"),
    selection=Selection(option="linear_attention_backend", value="cake"),
    kernel_packages=(
        KernelPackage(name="kda", module="cake.kda", path="csrc"),
        KernelPackage(name="state_chain", module="cake.kda", path="_vendor/state_chain"),
    ),
    entry_points={
        "chunk_kda": "cake.kda.api:chunk_kda",
        "kcp_chunk_kda": "cake.kda.api:kcp_chunk_kda",
    },
    bench="cake.kda.bench:BENCH",
    verify="cake.kda.verify:VERIFY",
    fla="cake.kda.fla:ADAPTER",
    flags=(
        Flag(
            name="recompute-state",
            kind="bool",
            default=False,
            help="keep the inputs alone for the backward and walk the chunk states again there; same bits",
        ),
    ),
)
