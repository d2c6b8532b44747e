"""What the parts of a call take on an H200: by it the planner cuts sequences (`cake.core.segments`)."""

from __future__ import annotations

from cake.core import segments as planner
from cake.core.segments import Cost, Segments
from cake.core.sequences import Sequences

__all__ = ["RATES", "cut_of_call"]

# One channel that hardly decays keeps a head's maps: its pre-scans walk everything, so that they count whole
# where the planner takes half.
RATES = Cost(
    start=4000,
    scan=2600,
    adjoint=2700,
    transfer=2 * 2400,
    adjoint_transfer=2 * 2000,
    merge=3500,
    half=70,
    full=4400,
)


def cut_of_call(
    seqs: Sequences, heads: int, segments: int | None, packing_invariant: bool
) -> Segments | None:
    """`cake.core.segments.cut_of_call` of this op's calls."""
    return planner.cut_of_call(seqs, heads, segments, packing_invariant, rates=RATES, chooses=True)
