"""What the parts of a call take on an H200: by it the planner cuts sequences (`cake.core.segments`)."""

from __future__ import annotations

from functools import partial

from cake.core import segments as planner
from cake.core.segments import Cost

__all__ = ["RATES", "cut_of_call"]

# One channel that hardly decays keeps a head's maps: its pre-scans walk everything, so that they count whole
# where the planner takes half.
RATES = Cost(
    scan=2600, adjoint=2700, transfer=2 * 2400, adjoint_transfer=2 * 2000, merge=3500, half=70, full=4400
)

#: `cake.core.segments.cut_of_call` of this op's calls.
cut_of_call = partial(planner.cut_of_call, rates=RATES, chooses=True)
