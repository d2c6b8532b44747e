"""Helpers for the tests of ops: errors against a reference, equality of bits, memory that shows mistakes.

Public API of cake-core: the tests inside an op's sdist import from here and run against every core that the
op accepts. ``cake.core.testing.markers`` holds the pytest hooks for the markers ``gpu`` and ``nvcc``.
"""

from cake.core.testing._bits import assert_bitwise_equal
from cake.core.testing._errors import (
    ErrorReport,
    Limit,
    TensorError,
    assert_within,
    error_report,
    relative_error,
)
from cake.core.testing._fla import stand_in_fla
from cake.core.testing._memory import (
    end_of_allocation,
    fused_views,
    permuted_view,
    pitched_view,
    poison_,
    poisoned_empty,
    spread_view,
)
from cake.core.testing._ops import installed_distribution, write_distribution
from cake.core.testing._ranks import Outcome, Ranks

__all__ = [
    "ErrorReport",
    "Limit",
    "Outcome",
    "Ranks",
    "TensorError",
    "assert_bitwise_equal",
    "assert_within",
    "end_of_allocation",
    "error_report",
    "fused_views",
    "installed_distribution",
    "permuted_view",
    "pitched_view",
    "poison_",
    "poisoned_empty",
    "relative_error",
    "spread_view",
    "stand_in_fla",
    "write_distribution",
]
