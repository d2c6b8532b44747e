"""Context parallelism: packs whose documents lie on several ranks, and the exchange of their states.

KcpContext, build_kcp_context   where the tokens of a pack lie (`_context`, `_partition`)
forward, backward, Walks        a call in terms of stages that walk a part of the sequences (`_run`)
forward_jointly, JointWalks, …  and of stages that walk all of them at once (`_joint`)
Plan                            what one rank walks, sends and merges (`_plan`), exchanges (`_exchange`)
untraced                        what a compiled region breaks at (`_untraced`)
of_call                         the plan of a call under any context; flash-linear-attention's (`_fla`)
"""

from __future__ import annotations

from cake.core.cp._context import KcpContext, build_kcp_context
from cake.core.cp._fla import Call, of_call, refuse_states
from cake.core.cp._joint import Cut, JointWalks, StageWalks, backward_jointly, cut_of, forward_jointly
from cake.core.cp._partition import LAYOUTS, ConvBoundary, Partition, Piece, partition
from cake.core.cp._plan import ROLES, Plan
from cake.core.cp._run import Forward, Walks, backward, forward
from cake.core.cp._untraced import untraced

__all__ = [
    "LAYOUTS",
    "ROLES",
    "Call",
    "ConvBoundary",
    "Cut",
    "Forward",
    "JointWalks",
    "KcpContext",
    "Partition",
    "Piece",
    "Plan",
    "StageWalks",
    "Walks",
    "backward",
    "backward_jointly",
    "build_kcp_context",
    "cut_of",
    "forward",
    "forward_jointly",
    "of_call",
    "partition",
    "refuse_states",
    "untraced",
]
