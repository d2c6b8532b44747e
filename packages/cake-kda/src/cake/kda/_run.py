"""A call as it runs: on kernels played from recordings (`cake.core.played`), else stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cake.core import played
from cake.core.recording import empty, known
from cake.kda import _autograd, _route, _stages
from cake.kda._autograd import INPUTS, MAPS, Call, Tensors, prepare, walk_backward, walk_forward, walk_of
from cake.kda._checks import HEAD_DIM
from cake.kda._stages import Prep

BETA, STATE = INPUTS.index("beta"), INPUTS.index("initial_state")


def run(
    tensors: tuple[Any, ...], call: Call, cu_seqlens: torch.Tensor | None, state_v_first: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow.

    Args:
        tensors: in the order of `INPUTS`, as they were given, but beta is no logit unless kernels run the
            call.
        cu_seqlens, state_v_first: as of the call.
    """
    boundaries = cu_seqlens if call.seqs.boundaries is None else None
    if state_v_first and tensors[STATE] is not None:
        tensors = (*tensors[:STATE], tensors[STATE].transpose(-1, -2), *tensors[STATE + 1 :])
    if call.seqs.total:
        _route.note(call.route)
    if call.played:
        o, final_state = played.run(_OP, call, tensors, boundaries)
    else:
        o, final_state = _autograd.run(by_head(tensors), call.at(boundaries))
    if state_v_first and final_state is not None:
        final_state = final_state.transpose(-1, -2).contiguous()
    return o, final_state


def by_head(x: Any) -> Tensors:
    """Inputs as stages take them: dt_bias [HV, 128]."""
    bias = x[-1]
    return Tensors._make((*x[:-1], bias if bias is None else bias.reshape(x[2].shape[2], HEAD_DIM)))


def _kernels() -> ModuleType:
    return _stages.stages("cuda")


def _kept(tape: str) -> tuple[bool, ...]:
    return tuple(name != "initial_state" or tape == "inputs" for name in INPUTS)


def _inputs(call: Call, given: Sequence[Any], beta: Any = None) -> Tensors:
    """Inputs of the stages; `beta`: where it is known already."""
    x = by_head(given)
    if beta is None and call.beta_scale is not None:
        beta = _kernels().sigmoid(x.beta, call.beta_scale)
    return x if beta is None else x._replace(beta=beta)


def _forward(call: Call, inputs: Sequence[Any], tape: str) -> tuple[Sequence[Any], Sequence[Any]]:
    x, save, final = _inputs(call, inputs), tape != "inputs", call.output_final_state
    prep = prepare(_kernels(), x, call, call.seqs)
    o, final_state, walk = walk_forward(
        _kernels(), x, prep, call.seqs, call, output_final_state=final, save_states=save
    )
    beta = None if call.beta_scale is None else x.beta
    pieces = (beta, walk.states, *walk.maps)
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
    beta, states, *rest = pieces or (None, None)
    x, scale, laid = _inputs(call, inputs, beta), call.beta_scale, into
    if into is not None and scale is not None:
        dq, dk, dv, _, dg = into
        laid = dq, dk, dv, empty(x.beta.shape, x.beta.dtype, x.beta.device), dg
    maps = tuple(rest[: len(MAPS) if call.segments is not None else 0])
    prep = Prep._make((*rest[len(maps) :], known("plan"))) if call.tape == "all" else None
    walk = walk_of(_kernels(), x, prep, states, maps, call.seqs, call)
    has_state = x.initial_state is not None
    grads = list(walk_backward(_kernels(), x, do, dht, walk, call.seqs, call, wanted, has_state, laid))
    if scale is not None and wanted[BETA]:
        logits = inputs[BETA]
        to = empty(logits.shape, logits.dtype, logits.device) if into is None else into[3]
        _kernels().sigmoid_backward(grads[BETA], logits, scale, to)
        grads[BETA] = to
    if grads[-1] is not None:
        grads[-1] = grads[-1].reshape(*inputs[-1].shape)
    return grads


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
