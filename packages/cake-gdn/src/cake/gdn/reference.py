"""The truth that the op is tested against: the recurrence in FP64, token by token, and its adjoint.

`g` has the shape [B, T, HV] here: one decay per head.
"""

from __future__ import annotations

from cake.core.recurrence import Gradients, backward, forward

__all__ = ["Gradients", "backward", "forward"]
