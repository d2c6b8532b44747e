"""What calls run. This module owns the process's last route and the set of routes that were logged."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

_log = logging.getLogger("cake")

#: What a forward keeps for its backward: its inputs alone; the chunk states too; all of `prep`'s results too.
Tape = Literal["inputs", "states", "all"]


@dataclass(frozen=True)
class Route:
    """What a call ran, and its backward will run.

    path: "single", one rank; "kcp", under a `KcpContext`; "fla", under flash-linear-attention's context.
    variant: "det" or "fast".
    backend: "torch", the reference backend, or "cuda".
    tape: "inputs" (states walked again in the backward), "states" or "all".
    """

    path: str
    variant: str
    backend: str
    tape: Tape

    def __str__(self) -> str:
        return f"{_PATHS[self.path]}, {self.variant}, {self.backend}, {self.tape} saved"


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
        _log.info("kda runs: %s", route)


def last_route() -> Route | None:
    """The route of the process's latest forward call of the op, or None before the first one.

    A call without tokens runs nothing and leaves the route as it was.
    """
    return _last
