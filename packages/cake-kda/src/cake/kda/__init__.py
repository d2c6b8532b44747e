"""Kimi Delta Attention for training. Importing this package imports neither torch nor kernels."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cake.core.cp import KcpContext as KcpContext
    from cake.core.cp import build_kcp_context as build_kcp_context
    from cake.kda.api import Route as Route
    from cake.kda.api import chunk_kda as chunk_kda
    from cake.kda.api import kcp_chunk_kda as kcp_chunk_kda
    from cake.kda.api import last_route as last_route

__all__ = [
    "SPEC",
    "KcpContext",
    "Route",
    "__version__",
    "build_kcp_context",
    "chunk_kda",
    "kcp_chunk_kda",
    "last_route",
]

_HOME = {
    "SPEC": "cake.kda.spec",
    "Route": "cake.kda.api",
    "KcpContext": "cake.core.cp",
    "build_kcp_context": "cake.core.cp",
    "chunk_kda": "cake.kda.api",
    "kcp_chunk_kda": "cake.kda.api",
    "last_route": "cake.kda.api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cake-kda")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
