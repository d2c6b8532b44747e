"""The declaration of the op; torch-free."""

from __future__ import annotations

from cake.core.spec import Flag, KernelPackage, OpSpec, Selection

__all__ = ["SPEC"]

SPEC = OpSpec(
    name="gdn",
    distribution="cake-gdn",
    summary="Gated delta rule with one decay per head (Qwen3-Next, Qwen3.5)",
    variants=("det", "fast"),
    selection=Selection(option="linear_attention_backend", value="cake"),
    kernel_packages=(
        KernelPackage(name="gdn", module="cake.gdn", path="csrc"),
        KernelPackage(name="state_chain", module="cake.gdn", path="_vendor/state_chain"),
    ),
    entry_points={
        "chunk_gated_delta_rule": "cake.gdn.api:chunk_gated_delta_rule",
        "kcp_chunk_gated_delta_rule": "cake.gdn.api:kcp_chunk_gated_delta_rule",
    },
    bench="cake.gdn.bench:BENCH",
    verify="cake.gdn.verify:VERIFY",
    fla="cake.gdn.fla:ADAPTER",
    flags=(
        Flag(
            name="recompute-state",
            kind="bool",
            default=False,
            help="keep the inputs alone for the backward and walk the chunk states again there; same bits",
        ),
    ),
)
