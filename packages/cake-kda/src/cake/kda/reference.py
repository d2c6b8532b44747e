"""The truth that the op is tested against: the recurrence in FP64, token by token, and its adjoint.

`g` has the shape [B, T, HV, K] here: one decay per key channel.
"""

from __future__ import annotations

from cake.core.recurrence import Gradients, backward, forward

__all__ = ["Gradients", "backward", "forward"]
