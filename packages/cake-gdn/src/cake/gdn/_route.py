"""What calls run, and the routes of this process."""

from __future__ import annotations

from dataclasses import dataclass

from cake.core.routes import PATHS, Routes


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
        return f"{PATHS[self.path]}, {self.variant}, {self.backend}, {tape}"


_routes: Routes[Route] = Routes("gdn")
note = _routes.note


def last_route() -> Route | None:
    """The route of the process's latest forward call of the op, or None before the first one.

    A call without tokens runs nothing and leaves the route as it was.
    """
    return _routes.last()
