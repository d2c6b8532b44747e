"""What the parts of a call take on an H200: by it the planner cuts sequences (`cake.core.segments`)."""

from __future__ import annotations

from cake.core.segments import Cost

__all__ = ["RATES"]

RATES = Cost(scan=3400, adjoint=3400, transfer=2400, adjoint_transfer=2800, half=60)
