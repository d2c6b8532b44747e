"""The context of a call whose tokens are one rank's part of a pack: host metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any

from cake.core.checks import check_count
from cake.core.cp._partition import ConvBoundary, Fragments, Partition, partition
from cake.core.cp._plan import Plan, make_plan
from cake.core.sequences import host_values

if TYPE_CHECKING:
    import torch

__all__ = ["KcpContext", "build_kcp_context"]


@dataclass(frozen=True, eq=False)
class KcpContext:
    """One rank's part of a pack that is spread over the ranks of a group: see `build_kcp_context`.

    partition: where every token lies.
    rank: this rank in the group.
    group: the process group; None: the default one.
    device: of `cu_seqlens`.
    conv_kernel_size: of the causal convolution that `conv` speaks of.
    """

    partition: Partition
    rank: int
    group: Any = field(repr=False)
    device: Any
    conv_kernel_size: int

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.partition.world_size

    @property
    def fragments(self) -> tuple[tuple[int, int], ...]:
        """Ranges of global tokens that this rank holds, in local order."""
        return self.partition.fragments[self.rank]

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the local sequences, from 0 to the number of local tokens.

        A local sequence is a document, or as much of one as follows on this rank without a gap; documents
        without tokens here have none.
        """
        return self.partition.local_boundaries(self.rank)

    @property
    def tokens(self) -> int:
        """Number of local tokens."""
        return self.boundaries[-1]

    @property
    def documents(self) -> tuple[int, ...]:
        """Index of the document of each local sequence."""
        return tuple(piece.document for piece in self.partition.pieces[self.rank])

    @property
    def crosses(self) -> bool:
        """Whether any document lies on several ranks; calls exchange states if so, on every rank alike."""
        return self.partition.crosses

    @cached_property
    def conv(self) -> tuple[ConvBoundary, ...]:
        """For each local sequence, what a causal convolution of `conv_kernel_size` needs from before it."""
        return self.partition.conv_boundaries(self.rank, self.conv_kernel_size)

    @cached_property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        """`boundaries` as int32 on the CPU, for other layers."""
        import torch

        return torch.tensor(self.boundaries, dtype=torch.int32, device="cpu")

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """`boundaries` as int32 on `device`, for other layers."""
        return self.cu_seqlens_cpu if self.device is None else self.cu_seqlens_cpu.to(self.device)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of a tensor over all tokens of the pack; differentiable.

        Raises:
            ValueError: dimension `dim` doesn't have the pack's number of tokens.
        """
        import torch

        total = self.partition.boundaries[-1]
        if x.shape[dim] != total:
            raise ValueError(f"dimension {dim} of x must have the pack's {total} tokens, got {x.shape[dim]}")
        parts = [x.narrow(dim, start, end - start) for start, end in self.fragments]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def plan(self, device_type: str) -> Plan:
        """What this rank walks, sends and merges."""
        # gloo aborts a process that gets another size than it expects, before any check of ours could speak.
        return make_plan(self.partition, self.rank, device_type == "cpu")


def build_kcp_context(
    cu_seqlens_global: torch.Tensor | Sequence[int],
    group: Any = None,
    *,
    device: torch.device | str | None = None,
    conv_kernel_size: int = 4,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> KcpContext:
    """Spreads a pack of documents over the ranks of a group, and says what this rank holds of it.

    Every rank calls it with the same arguments. Nothing is read from a device and nothing is sent. The last
    64 partitions are remembered by their content.

    Args:
        cu_seqlens_global: N + 1 boundaries of the documents of the whole pack, a list of ints or a CPU
            tensor. Documents without tokens are allowed.
        group: process group of torch.distributed; None: the default one, or a world of one rank where
            torch.distributed isn't initialised.
        device: where the context's `cu_seqlens` for other layers shall be; None: the CPU.
        conv_kernel_size: of the causal convolution that the context's `conv` speaks of.
        layout: "contiguous": rank r holds the r-th of as many equal ranges of tokens as there are ranks.
            "zigzag": ranges r and 2W - 1 - r of 2W equal ones, W the world's size.
            "zigzag_per_document": the same of every document by itself.
        fragments: in place of a layout, for each rank its ranges (first, end) of global tokens in local
            order.

    Raises:
        TypeError: boundaries that are neither a tensor nor a list, a kernel size that is no whole number.
        ValueError: boundaries on a device, or that decrease or don't start at 0; tokens that the layout can't
            divide; fragments that don't hold every token exactly once; an unknown layout; no kernel size.
    """
    bounds = tuple(host_values("cu_seqlens_global", cu_seqlens_global))
    if len(bounds) < 2 or bounds[0] != 0 or any(end < start for start, end in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens_global must hold N + 1 >= 2 boundaries that rise from 0, got {_short(bounds)}"
        )
    conv_kernel_size = check_count("conv_kernel_size", conv_kernel_size)
    rank, world_size = rank_and_world(group)
    return KcpContext(
        partition=partition(bounds, world_size, layout, None if fragments is None else _ranges(fragments)),
        rank=rank,
        group=group,
        device=device,
        conv_kernel_size=conv_kernel_size,
    )


def rank_and_world(group: Any) -> tuple[int, int]:
    """This process's rank in a group and the group's size; (0, 1) of no group where nothing is initialised.

    Raises:
        ValueError: this process isn't in the group.
    """
    import torch.distributed as dist

    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must be one that this process belongs to")
    return rank, dist.get_world_size(group)


def _ranges(fragments: Any) -> Fragments:
    try:
        return tuple(tuple((index(start), index(end)) for start, end in local) for local in fragments)
    except (TypeError, ValueError):
        raise ValueError(
            f"fragments must be a list of (first, end) token ranges for each rank, got {_short(fragments)}"
        ) from None


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."
