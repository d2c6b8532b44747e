"""A call as it runs: on kernels played from recordings (`cake.core.played`), else stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cake.core import played
from cake.core.recording import empty, known
from cake.gdn import _autograd, _route, _stages
from cake.gdn._autograd import Call, Inputs, Walk, walk_again, walk_backward, walk_forward
from cake.gdn._stages import Prep


def run(
    tensors: tuple[Any, ...], call: Call, cu_seqlens: torch.Tensor | None, state_v_first: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow.

    Args:
        tensors: q, k, v, the log decay, beta and the initial state; beta as it was given where kernels run
            the call, else no logits.
        cu_seqlens, state_v_first: as of the call.
    """
    boundaries = cu_seqlens if call.seqs.boundaries is None else None
    if state_v_first and tensors[5] is not None:
        tensors = (*tensors[:5], tensors[5].transpose(-1, -2))
    if call.seqs.total:
        _route.note(call.route)
    if call.played:
        o, final_state = played.run(_OP, call, tensors, boundaries)
    else:
        q, k, v, g, beta, initial_state = tensors
        o, final_state = _autograd.run(q, k, v, g, beta, initial_state, call.at(boundaries))
    if state_v_first and final_state is not None:
        final_state = final_state.transpose(-1, -2).contiguous()
    return o, final_state


def _kernels() -> ModuleType:
    return _stages.stages("cuda")


def _kept(tape: str) -> tuple[bool, ...]:
    again = tape == "inputs"
    return True, True, True, again, True, again


def _beta(call: Call, given: Any) -> Any:
    """Betas of the stages."""
    return given if call.beta_scale is None else _kernels().sigmoid(given, call.beta_scale)


def _forward(call: Call, inputs: Sequence[Any], tape: str) -> tuple[Sequence[Any], Sequence[Any]]:
    q, k, v, g, given, initial_state = inputs
    beta = _beta(call, given)
    save, final = tape != "inputs", call.output_final_state
    o, final_state, walk = walk_forward(
        _kernels(), q, k, v, g, beta, initial_state, call, output_final_state=final, save_states=save
    )
    t, b, rk, _ = walk.prep
    kept = None if call.beta_scale is None else beta
    return (o, final_state), (t, b, rk, kept, walk.states, *walk.maps)


def _backward(
    call: Call,
    inputs: Sequence[Any],
    do: Any,
    dht: Any,
    pieces: Sequence[Any] | None,
    wanted: tuple[bool, ...],
    into: Sequence[Any] | None,
) -> Sequence[Any]:
    q, k, v, g, given, initial_state = inputs
    if pieces is None:
        beta = _beta(call, given)
        walk = walk_again(_kernels(), q, k, v, beta, g, initial_state, call)
    else:
        t, b, rk, kept, states, *maps = pieces
        beta = given if call.beta_scale is None else kept
        walk = Walk(Prep(t, b, rk, known("plan")), states, tuple(maps))
    made, has_state = Inputs(q.shape, v.shape, g.dtype, beta.dtype, q.device), initial_state is not None
    laid = into
    if into is not None and call.beta_scale is not None:
        laid = (*into[:3], empty(beta.shape, beta.dtype, beta.device), into[4])
    stages = _kernels()
    grads = list(
        walk_backward(stages, q, k, v, beta, do, dht, walk, made, call, wanted, has_state, into=laid)
    )
    if call.beta_scale is not None and wanted[4]:
        to = empty(given.shape, given.dtype, given.device) if into is None else into[3]
        stages.sigmoid_backward(grads[4], given, call.beta_scale, to)
        grads[4] = to
    return grads


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
