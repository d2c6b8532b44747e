"""Forward and backward of a call whose documents lie on several ranks, in terms of an op's stages.

Both directions go alike: walk what others wait for, start the exchange, walk what waits for nobody, wait,
merge, walk the rest. A sequence's tape depends on its role: states that enter it and adjoints that leave it
have slots where they aren't zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cake.core.cp._exchange import Exchange
from cake.core.cp._plan import ENTERED, LEFT, ROLES, Direction, Plan
from cake.core.sequences import Sequences
from cake.core.state_chain import Step

__all__ = ["Forward", "Walks", "backward", "forward"]


class Walks(Protocol):
    """An op's stages in one call, with its tensors and results. States are fp32 [n, HV, 128, 128]."""

    heads: int
    device: torch.device

    def scan(
        self, seqs: Sequences, entering: torch.Tensor | None, *, final: bool, save: bool, output: bool
    ) -> tuple[torch.Tensor | None, Any]:
        """Final states and tape; writes the call's output unless `output` is False."""

    def transfer(self, seqs: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """B and M of each sequence."""

    def adj(
        self, seqs: Sequences, leaving: torch.Tensor | None, *, need_dh0: bool
    ) -> tuple[Any, torch.Tensor | None]:
        """Tape of the adjoint walk, and the adjoints that reach each sequence's start."""

    def adj_transfer(self, seqs: Sequences) -> torch.Tensor:
        """B of each sequence's adjoint walk."""

    def out(
        self,
        seqs: Sequences,
        tape: Any,
        adj_tape: Any,
        *,
        states_edge: bool,
        adj_edge: bool,
    ) -> None:
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


@dataclass(frozen=True)
class Forward:
    """What a forward leaves for its backward.

    tapes: what the op's walk left of each role, if it was to be saved.
    entering: the states that entered middle and last pieces.
    maps: M of the pieces that the backward merges through.
    """

    tapes: dict[str, Any]
    entering: torch.Tensor | None
    maps: torch.Tensor | None


def forward(plan: Plan, walks: Walks, group: Any, *, save: bool) -> Forward:
    """The forward of a rank; `walks` holds what `prep` made of it, and gets its output.

    Args:
        plan: the rank's part.
        walks: the op's stages.
        group: process group of the context.
        save: whether to keep tapes.
    """
    roles, d = plan.roles, plan.forward
    tapes: dict[str, Any] = {}

    def scan(role: str, entering: torch.Tensor | None = None, *, final: bool = False) -> Any:
        seqs = roles[role]
        if seqs is None:
            return None
        end, tape = walks.scan(seqs, entering, final=final, save=save, output=True)
        if tape is not None:
            tapes[role] = tape
        return end

    exchange = None
    if d.tiles:
        exchange = exchange_of("forward", plan, walks, group)
        # The walk of a first piece is the real one: nothing enters it.
        ends = [scan("first", final=True)]
        own_maps = None
        if roles["middle"] is not None:
            b, own_maps = walks.transfer(roles["middle"])
            ends.append(b)
        fill(exchange, plan, d, ends, own_maps)
        exchange.start()
    scan("alone")
    entering = maps = None
    if exchange is not None:
        b, m = halves(exchange.wait(), plan)
        if d.chains:
            entering = walks.merge(b, m, d.chains, d.receivers, transposed=False)
            for role, states_in in zip(ENTERED, _split(entering, plan, ENTERED), strict=True):
                scan(role, states_in)
        maps = own_maps if plan.joined else kept_of(plan, m)
    return Forward(tapes=tapes, entering=entering, maps=maps)


def backward(plan: Plan, walks: Walks, group: Any, made: Forward) -> None:
    """The backward of a rank; `walks` holds the gradient of the output, and gets all others.

    Tapes that `made` doesn't have are made again, while the exchange is under way.
    """
    roles, d = plan.roles, plan.backward
    tapes = dict(made.tapes)
    entering = dict.fromkeys(ROLES, None) | dict(
        zip(ENTERED, _split(made.entering, plan, ENTERED), strict=True)
    )
    adjoints: dict[str, tuple[Any, bool]] = {}

    def walk_again(role: str) -> None:
        seqs = roles[role]
        if seqs is not None and role not in tapes:
            _, tapes[role] = walks.scan(seqs, entering[role], final=False, save=True, output=False)

    def adj(role: str, leaving: torch.Tensor | None = None, *, need_dh0: bool = False) -> Any:
        seqs = roles[role]
        if seqs is None:
            return None
        tape, dh0 = walks.adj(seqs, leaving, need_dh0=need_dh0)
        adjoints[role] = tape, leaving is not None
        return dh0

    def out(role: str) -> None:
        seqs = roles[role]
        if seqs is not None:
            tape, edge = adjoints.pop(role)
            walks.out(seqs, tapes.pop(role), tape, states_edge=role in ENTERED, adj_edge=edge)

    exchange = None
    if d.tiles:
        exchange = exchange_of("backward", plan, walks, group)
        ends: list[torch.Tensor | None] = []
        if roles["middle"] is not None:
            ends.append(walks.adj_transfer(roles["middle"]))
        # The walk of a last piece is the real one.
        ends.append(adj("last", need_dh0=True))
        fill(exchange, plan, d, ends, None if made.maps is None or not plan.joined else made.maps.mT)
        exchange.start()
    for role in ROLES:
        walk_again(role)
    adj("alone")
    for role in ("alone", "last"):
        out(role)
    if exchange is not None:
        b, m = halves(exchange.wait(), plan)
        if d.chains:
            if not plan.joined:
                m = b[:0] if made.maps is None else made.maps
            leaving = walks.merge(b, m, d.chains, d.receivers, transposed=not plan.joined)
            for role, adjoints_in in zip(LEFT, _split(leaving, plan, LEFT), strict=True):
                adj(role, adjoints_in)
                out(role)


def exchange_of(kind: str, plan: Plan, walks: Any, group: Any) -> Exchange:
    """The exchange of one direction."""
    return Exchange(
        kind,
        (plan.forward if kind == "forward" else plan.backward).tiles,
        walks.heads,
        256 if plan.joined else 128,
        plan.digest,
        walks.device,
        group,
        collective=plan.collective,
        tagged=not plan.joined,
    )


def fill(
    exchange: Exchange,
    plan: Plan,
    direction: Direction,
    ends: Sequence[torch.Tensor | None],
    maps: torch.Tensor | None,
) -> None:
    """Writes this rank's tiles: `ends` hold the B of its senders, `maps` the M of its middle pieces.

    One by one: an index of many would be copied to a GPU, which waits for it.
    """
    b, m = halves(exchange.tiles(), plan)
    rows = [row for x in ends if x is not None for row in x]
    for tile, row in zip(direction.b, rows, strict=True):
        b[tile].copy_(row)
    if maps is not None:
        for tile, row in zip(direction.m, maps, strict=False):
            m[tile].copy_(row)


def kept_of(plan: Plan, maps: torch.Tensor) -> torch.Tensor | None:
    """The maps that the backward merges with, of all that the forward gathered."""
    return torch.stack([maps[tile] for tile in plan.kept]) if plan.kept else None


def halves(tiles: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of B and tiles of M."""
    return (tiles[..., :128], tiles[..., 128:]) if plan.joined else (tiles, tiles)


def _split(
    states: torch.Tensor | None, plan: Plan, roles: tuple[str, str]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows of two roles."""
    if states is None:
        return None, None
    one = plan.roles[roles[0]]
    n = 0 if one is None else one.n
    return states[:n], states[n:]
