"""What an op's calls run: the process's last route, each logged when it is first seen."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

__all__ = ["PATHS", "Routes"]

_log = logging.getLogger("cake")

R = TypeVar("R")

#: Paths of a call, and how the log says them.
PATHS = {"single": "single rank", "kcp": "KCP", "fla": "flash-linear-attention's context parallelism"}


class Routes(Generic[R]):
    """The routes of one op in this process; a route is a frozen record that says itself as text.

    Args:
        op: its name.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._last: R | None = None
        self._seen: set[R] = set()

    def note(self, route: R) -> None:
        """Makes `route` the last one and logs it if the process sees it for the first time."""
        if route is self._last:
            return
        self._last = route
        if route not in self._seen:
            self._seen.add(route)
            _log.info("%s runs: %s", self._op, route)

    def last(self) -> R | None:
        """The latest one; None before the first."""
        return self._last
