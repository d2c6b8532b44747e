"""What calls run. This module owns the process's last route and the set of routes that were logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger("cake")


@dataclass(frozen=True)
class Route:
    """What a call ran, and its backward will run.

    path: "single", one rank; "kcp", under a `KcpContext`; "fla", under flash-linear-attention's context.
    variant: "det" or "fast".
    backend: "torch" (a CPU) or "cuda".
    recompute_state: whether a backward walks the states again.
    """

    path: str
    variant: str
    backend: str
    recompute_state: bool

    def __str__(self) -> str:
        tape = "states recomputed" if self.recompute_state else "states saved"
        return f"{_PATHS[self.path]}, {self.variant}, {self.backend}, {tape}"


_PATHS = {"single": "single rank", "kcp": "KCP", "fla": "flash-linear-attention's context parallelism"}
_last: Route | None = None
_seen: set[Route] = set()


def note(route: Route) -> None:
    """Makes `route` the last one and logs it if the process sees it for the first time."""
    global _last
    if route is _last:
        return
    _last = route
    if route not in _seen:
        _seen.add(route)
        _log.info("gdn runs: %s", route)


def last_route() -> Route | None:
    """The route of the process's latest forward call of the op, or None before the first one.

    A call without tokens runs nothing and leaves the route as it was.
    """
    return _last
