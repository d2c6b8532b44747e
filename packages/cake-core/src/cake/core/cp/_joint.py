"""The same call for stages that walk all sequences at once: kernels read one table of the whole call.

A rank's sequences are walked as segments whose neighbours lie on other ranks (`Plan.segments`). A pre-scan
finds the maps of those that have one, the exchange brings everyone's, and then everything is walked from the
merged states.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from cake.core.cp._plan import ENTERED, LEFT, Plan
from cake.core.cp._run import Forward, exchange_of, fill, halves, kept_of
from cake.core.segments import Segments
from cake.core.sequences import Sequences
from cake.core.state_chain import Step

__all__ = ["JointWalks", "backward_jointly", "forward_jointly"]


class JointWalks(Protocol):
    """An op's stages in one call, with its tensors and results. States are fp32 [segments, HV, 128, 128]."""

    heads: int
    device: torch.device

    def scan(self, seqs: Sequences, entering: torch.Tensor | None, *, save: bool, output: bool) -> Any:
        """Tape of the walk; writes the call's output unless `output` is False."""

    def transfer(self, segments: Segments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """B, M and which maps aren't 0."""

    def adj(self, seqs: Sequences, leaving: torch.Tensor | None) -> Any:
        """Tape of the adjoint walk."""

    def adj_transfer(self, segments: Segments, live: torch.Tensor) -> torch.Tensor:
        """B of the adjoint walk."""

    def out(self, seqs: Sequences, tape: Any, adj_tape: Any, *, edge: bool) -> None:
        """The parallel rest of the backward from both tapes, into the call's gradients."""

    def merge(
        self,
        b: torch.Tensor,
        m: torch.Tensor,
        chains: tuple[tuple[Step, ...], ...],
        n_out: int,
        *,
        transposed: bool,
    ) -> torch.Tensor:
        """States along chains: see `cake.core.state_chain.merge`."""


def forward_jointly(plan: Plan, walks: JointWalks, group: Any, *, save: bool) -> Forward:
    """The forward of a rank; see `forward`. The tape is that of the role "all"."""
    d = plan.forward
    if not d.tiles:
        if plan.seqs.total:
            tape = walks.scan(plan.seqs, None, save=save, output=True)
            return Forward(tapes={"all": tape} if save else {}, entering=None, maps=None)
        return Forward(tapes={}, entering=None, maps=None)
    exchange = exchange_of("forward", plan, walks, group)
    live = own_maps = None
    if plan.seqs.total:
        b, m, live = walks.transfer(plan.segments)
        own_maps = _rows(m, plan.segments_of("middle"))
        fill(exchange, plan, d, [_rows(b, plan.segments_of(*LEFT))], own_maps)
    exchange.start()
    b, m = halves(exchange.wait(), plan)
    entering = walks.merge(b, m, d.chains, d.receivers, transposed=False) if d.chains else None
    tapes: dict[str, Any] = {}
    if plan.seqs.total:
        states = _spread(plan, entering, plan.segments_of(*ENTERED), walks)
        tape = walks.scan(plan.segments, states, save=save, output=True)
        tapes = {"all": tape, "live": live} if save else {"live": live}
    maps = own_maps if plan.joined else kept_of(plan, m)
    return Forward(tapes=tapes, entering=entering, maps=maps)


def backward_jointly(plan: Plan, walks: JointWalks, group: Any, made: Forward) -> None:
    """The backward of a rank; see `backward`."""
    d, empty = plan.backward, not plan.seqs.total
    tape = made.tapes.get("all")
    if not d.tiles:
        if not empty:
            tape = walks.scan(plan.seqs, None, save=True, output=False) if tape is None else tape
            walks.out(plan.seqs, tape, walks.adj(plan.seqs, None), edge=False)
        return
    exchange = exchange_of("backward", plan, walks, group)
    if not empty:
        b = walks.adj_transfer(plan.segments, made.tapes["live"])
        echoed = None if made.maps is None or not plan.joined else made.maps.mT
        fill(exchange, plan, d, [_rows(b, plan.segments_of(*ENTERED))], echoed)
    exchange.start()
    if not empty and tape is None:
        states = _spread(plan, made.entering, plan.segments_of(*ENTERED), walks)
        tape = walks.scan(plan.segments, states, save=True, output=False)
    b, m = halves(exchange.wait(), plan)
    leaving = None
    if d.chains:
        if not plan.joined:
            m = b[:0] if made.maps is None else made.maps
        leaving = walks.merge(b, m, d.chains, d.receivers, transposed=not plan.joined)
    if not empty:
        states = _spread(plan, leaving, plan.segments_of(*LEFT), walks)
        walks.out(plan.segments, tape, walks.adj(plan.segments, states), edge=True)


def _rows(states: torch.Tensor, segments: tuple[int, ...]) -> torch.Tensor | None:
    return torch.stack([states[s] for s in segments]) if segments else None


def _spread(
    plan: Plan, states: torch.Tensor | None, segments: tuple[int, ...], walks: JointWalks
) -> torch.Tensor:
    """Merged states in the rows of their segments; nobody reads the others."""
    spread = torch.empty((plan.segments.n, walks.heads, 128, 128), dtype=torch.float32, device=walks.device)
    if states is not None:
        for segment, row in zip(segments, states, strict=True):
            spread[segment].copy_(row)
    return spread
