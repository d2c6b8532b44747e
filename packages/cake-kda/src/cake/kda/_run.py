"""A call as it runs: on kernels played from recordings (`cake.core.played`), else stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cake.core import played
from cake.core.recording import known
from cake.kda import _autograd, _route, _stages
from cake.kda._autograd import INPUTS, MAPS, Call, Tensors, prepare, walk_backward, walk_forward, walk_of
from cake.kda._stages import Prep


def run(
    tensors: Tensors, call: Call, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow.

    `cu_seqlens`: as the call was given them.
    """
    boundaries = cu_seqlens if call.seqs.boundaries is None else None
    if call.played:
        _route.note(call.route)
        return played.run(_OP, call, tensors, boundaries)
    if call.seqs.total:
        _route.note(call.route)
    return _autograd.run(tensors, call.at(boundaries))


def _kernels() -> ModuleType:
    return _stages.stages("cuda")


def _kept(tape: str) -> tuple[bool, ...]:
    return tuple(name != "initial_state" or tape == "inputs" for name in INPUTS)


def _forward(call: Call, inputs: Sequence[Any], tape: str) -> tuple[Sequence[Any], Sequence[Any]]:
    x, save, final = Tensors(*inputs), tape != "inputs", call.output_final_state
    prep = prepare(_kernels(), x, call, call.seqs)
    o, final_state, walk = walk_forward(
        _kernels(), x, prep, call.seqs, call, output_final_state=final, save_states=save
    )
    pieces = (walk.states, *walk.maps)
    return (o, final_state), (*pieces, *prep[:-1]) if tape == "all" else pieces


def _backward(
    call: Call,
    inputs: Sequence[Any],
    do: Any,
    dht: Any,
    pieces: Sequence[Any] | None,
    wanted: tuple[bool, ...],
    into: Sequence[Any] | None,
) -> Sequence[Any]:
    x = Tensors(*inputs)
    states, *rest = pieces or (None,)
    maps = tuple(rest[: len(MAPS) if call.segments is not None else 0])
    prep = Prep._make((*rest[len(maps) :], known("plan"))) if call.tape == "all" else None
    walk = walk_of(_kernels(), x, prep, states, maps, call.seqs, call)
    has_state = x.initial_state is not None
    return walk_backward(_kernels(), x, do, dht, walk, call.seqs, call, wanted, has_state, into)


_OP = played.Op(
    name="kda",
    inputs=INPUTS,
    rows=("q", "k", "v", "g"),
    laid=("q", "k", "v", "beta", "g"),
    stages=_kernels,
    kept=_kept,
    forward=_forward,
    backward=_backward,
)
