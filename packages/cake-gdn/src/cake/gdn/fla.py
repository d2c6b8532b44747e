"""``import cake.gdn.fla``: flash-linear-attention runs ours for its function; see `cake.core.fla`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cake.core import fla

__all__ = ["ADAPTER"]


def _refusal(given: Mapping[str, Any]) -> str | None:
    from cake.gdn import _stages

    def kernels(device: Any) -> str:
        backend = _stages.backend_name(device)
        if given.get("cp_context") is not None:
            _stages.check_context(backend)
        return backend

    if given.get("head_first"):
        return "cake serves [B, T, H, D] alone, got head_first=True"
    return fla.tensor_refusal(given, kernels)


ADAPTER = fla.Adapter(
    op="gdn",
    operation="gated_delta_rule",
    function="chunk_gated_delta_rule",
    target="cake.gdn.api:chunk_gated_delta_rule",
    refusal=_refusal,
    ours=frozenset({"variant", "recompute_state", "segments", "packing_invariant"}),
    rows=("q", "k", "v"),
)
fla.register(ADAPTER)
