"""What calls run, and the routes of this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cake.core.routes import PATHS, Routes

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
        return f"{PATHS[self.path]}, {self.variant}, {self.backend}, {self.tape} saved"


_routes: Routes[Route] = Routes("kda")
note = _routes.note


def last_route() -> Route | None:
    """The route of the process's latest forward call of the op, or None before the first one.

    A call without tokens runs nothing and leaves the route as it was.
    """
    return _routes.last()
