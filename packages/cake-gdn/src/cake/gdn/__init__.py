"""The gated delta rule for training. Importing this package imports neither torch nor kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cake.core.cp import KcpContext as KcpContext
    from cake.core.cp import build_kcp_context as build_kcp_context
    from cake.gdn.api import Route as Route
    from cake.gdn.api import chunk_gated_delta_rule as chunk_gated_delta_rule
    from cake.gdn.api import kcp_chunk_gated_delta_rule as kcp_chunk_gated_delta_rule
    from cake.gdn.api import last_route as last_route

__all__ = [
    "SPEC",
    "KcpContext",
    "Route",
    "__version__",
    "build_kcp_context",
    "chunk_gated_delta_rule",
    "kcp_chunk_gated_delta_rule",
    "last_route",
]

_HOME = {
    "SPEC": "cake.gdn.spec",
    "Route": "cake.gdn.api",
    "KcpContext": "cake.core.cp",
    "build_kcp_context": "cake.core.cp",
    "chunk_gated_delta_rule": "cake.gdn.api",
    "kcp_chunk_gated_delta_rule": "cake.gdn.api",
    "last_route": "cake.gdn.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cake-gdn")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
