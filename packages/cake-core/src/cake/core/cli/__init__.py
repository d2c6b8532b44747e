"""The `cake` command."""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    raise NotImplementedError("the cake command")
