"""``import cake.kda.fla``: flash-linear-attention's ``chunk_kda`` runs cake's; see `cake.core.fla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cake.core import fla

__all__ = ["ADAPTER"]


ROWS = ("q", "k", "v", "g")


def _refusal(given: Mapping[str, Any]) -> str | None:
    from cake.kda import _stages

    def kernels(device: Any) -> str:
        return _stages.backend_name(device, None)

    for name in ("return_intermediate_states", "use_graph"):
        if given.get(name):
            return f"cake doesn't serve {name}"
    if given.get("head_first"):
        return "cake serves [B, T, H, D] alone, got head_first=True"
    return fla.tensor_refusal(given, kernels, names=ROWS)


ADAPTER = fla.Adapter(
    op="kda",
    operation="kda",
    function="chunk_kda",
    target="cake.kda.api:chunk_kda",
    refusal=_refusal,
    ours=frozenset({"variant", "recompute_state", "segments", "packing_invariant", "backend"}),
    rows=ROWS,
)
fla.register(ADAPTER)
