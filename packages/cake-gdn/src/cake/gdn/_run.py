"""A call as it runs: on kernels played from recordings (`cake.core.played`), else stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cake.core import played
from cake.core.recording import known
from cake.gdn import _autograd, _route, _stages
from cake.gdn._autograd import Call, Inputs, Walk, walk_again, walk_backward, walk_forward
from cake.gdn._stages import Prep


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow.

    `cu_seqlens`: as the call was given them.
    """
    boundaries = cu_seqlens if call.seqs.boundaries is None else None
    if call.played:
        _route.note(call.route)
        return played.run(_OP, call, (q, k, v, g, beta, initial_state), boundaries)
    if call.seqs.total:
        _route.note(call.route)
    return _autograd.run(q, k, v, g, beta, initial_state, call.at(boundaries))


def _kernels() -> ModuleType:
    return _stages.stages("cuda")


def _kept(tape: str) -> tuple[bool, ...]:
    again = tape == "inputs"
    return True, True, True, again, True, again


def _forward(call: Call, inputs: Sequence[Any], tape: str) -> tuple[Sequence[Any], Sequence[Any]]:
    q, k, v, g, beta, initial_state = inputs
    save, final = tape != "inputs", call.output_final_state
    o, final_state, walk = walk_forward(
        _kernels(), q, k, v, g, beta, initial_state, call, output_final_state=final, save_states=save
    )
    t, b, rk, _ = walk.prep
    return (o, final_state), (t, b, rk, walk.states, *walk.maps)


def _backward(
    call: Call,
    inputs: Sequence[Any],
    do: Any,
    dht: Any,
    pieces: Sequence[Any] | None,
    wanted: tuple[bool, ...],
    into: Sequence[Any] | None,
) -> Sequence[Any]:
    q, k, v, g, beta, initial_state = inputs
    if pieces is None:
        walk = walk_again(_kernels(), q, k, v, beta, g, initial_state, call)
    else:
        t, b, rk, states, *maps = pieces
        walk = Walk(Prep(t, b, rk, known("plan")), states, tuple(maps))
    made, has_state = Inputs(q.shape, v.shape, g.dtype, beta.dtype, q.device), initial_state is not None
    return walk_backward(_kernels(), q, k, v, beta, do, dht, walk, made, call, wanted, has_state, into=into)


_OP = played.Op(
    name="gdn",
    inputs=("q", "k", "v", "g", "beta", "initial_state"),
    rows=("q", "k", "v"),
    laid=("q", "k", "v", "beta", "g"),
    stages=_kernels,
    kept=_kept,
    forward=_forward,
    backward=_backward,
)
