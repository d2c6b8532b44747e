"""One call of the op as a node of autograd: what is saved, what is recomputed, which gradients are made.

Every forward saves its inputs. The tape "states" adds the states before each chunk; the backward runs
`prep` again, whose results are twice as large. "all" adds those too. With "inputs" the backward runs `prep`
and `scan` again. The bits are the same by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cake.core.checks import check_saved
from cake.core.launch import loadable, running_on
from cake.core.sequences import Sequences
from cake.kda import _route, _stages
from cake.kda._route import Route
from cake.kda._stages import Gate, Prep

FP32 = torch.float32
_INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


@dataclass(frozen=True)
class Tensors:
    """A call's inputs; a_log and bias where the gate is computed in the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    a_log: torch.Tensor | None
    bias: torch.Tensor | None

    def all(self) -> tuple[torch.Tensor | None, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.a_log, self.bias)

    def gate(self, call: Call) -> Gate | None:
        return Gate(self.a_log, self.bias, call.lower_bound) if call.use_gate else None

    def state_shape(self, seqs: Sequences) -> tuple[int, ...]:
        return seqs.n, self.v.shape[2], self.q.shape[3], self.v.shape[3]


@dataclass(frozen=True)
class Call:
    """What a call is besides its tensors.

    use_gate: g is a raw gate; lower_bound: of that gate.
    differentiable: whether a backward can follow.
    """

    seqs: Sequences
    scale: float
    l2norm: bool
    use_gate: bool
    lower_bound: float | None
    output_final_state: bool
    route: Route
    differentiable: bool


def run(tensors: Tensors, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow."""
    if call.seqs.total:
        _route.note(call.route)
    if call.differentiable:
        apply: Any = _KimiDeltaAttention.apply
        o, final_state = apply(*tensors.all(), call)
    else:
        o, final_state, _, _ = forward(tensors, call, save_states=False)
    return o, final_state


class _KimiDeltaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *inputs, call = arguments
        tensors = Tensors(*inputs)
        ctx.set_materialize_grads(False)
        ctx.call = call
        tape = call.route.tape
        o, final_state, prep, states = forward(tensors, call, save_states=tape != "inputs")
        # Boundaries on the device are saved too: refilled in place before the backward, they raise there.
        saved: dict[str, torch.Tensor | None] = dict(zip(_INPUTS, tensors.all(), strict=True))
        if tape != "inputs":
            # Only walking again needs its values; the rest of the backward needs to know that it was there.
            saved["initial_state"] = None
        saved["cu_seqlens"] = call.seqs.cu_device
        saved["states"] = states
        if prep is not None and tape == "all":
            saved |= vars(prep)
        ctx.names = tuple(saved)
        ctx.made = {name: (x.shape, x.dtype, x.device) for name, x in saved.items() if x is not None}
        ctx.has_state = tensors.initial_state is not None
        ctx.save_for_backward(*saved.values())
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        if do is None and dht is None:
            return (None,) * (len(_INPUTS) + 1)
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for name, made in ctx.made.items():
            check_saved(name, saved[name], *made)
        tensors = Tensors(*(saved[name] for name in _INPUTS))
        seqs = call.seqs
        if saved["cu_seqlens"] is not None:
            seqs = replace(seqs, cu_device=saved["cu_seqlens"])
        prep = None
        if seqs.total and call.route.tape == "all":
            prep = Prep(**{name: saved[name] for name in Prep.__dataclass_fields__})
        wanted = ctx.needs_input_grad
        grads = backward(tensors, prep, saved["states"], do, dht, seqs, call, wanted, ctx.has_state)
        return (*(x if need else None for x, need in zip(grads, wanted, strict=False)), None)


def forward(
    x: Tensors, call: Call, *, save_states: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Prep | None, torch.Tensor | None]:
    """Output, final state, `prep`'s results and the states before each chunk, None unless they are saved."""
    seqs = call.seqs
    if not seqs.total:
        final_state = None
        if call.output_final_state and x.initial_state is None:
            final_state = x.v.new_zeros(x.state_shape(seqs), dtype=FP32)
        elif call.output_final_state and x.initial_state is not None:
            final_state = x.initial_state.clone(memory_format=torch.contiguous_format)
        return x.v.new_empty(x.v.shape), final_state, None, None
    stages = _stages.stages(call.route.backend)
    with running_on(x.v.device):
        prep = _prepare(stages, x, call, seqs)
        o, final_state, states = stages.scan(
            x.v,
            x.beta,
            prep,
            seqs,
            initial_state=None if x.initial_state is None else x.initial_state.contiguous(),
            output_final_state=call.output_final_state,
            save_states=save_states,
        )
    return o, final_state, prep, states


def backward(
    x: Tensors,
    prep: Prep | None,
    states: torch.Tensor | None,
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    seqs: Sequences,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the inputs; what of `prep` and `states` is None is made again."""
    if not seqs.total:
        return _empty_gradients(x, dht, seqs)
    do = x.v.new_zeros(x.v.shape) if do is None else loadable(do)
    dht = None if dht is None else dht.contiguous()
    stages = _stages.stages(call.route.backend)
    with running_on(x.v.device):
        prep = _prepare(stages, x, call, seqs) if prep is None else prep
        states = _walk_again(stages, x, prep, seqs) if states is None else states
        return _backward(stages, x, do, dht, prep, states, seqs, call, wanted, has_state)


def _prepare(stages: ModuleType, x: Tensors, call: Call, seqs: Sequences) -> Prep:
    prep: Prep = stages.prep(x.q, x.k, x.g, x.gate(call), x.beta, seqs, scale=call.scale, l2norm=call.l2norm)
    return prep


def _walk_again(stages: ModuleType, x: Tensors, prep: Prep, seqs: Sequences) -> torch.Tensor:
    initial_state = None if x.initial_state is None else x.initial_state.contiguous()
    states: torch.Tensor
    _, _, states = stages.scan(
        x.v, x.beta, prep, seqs, initial_state=initial_state, save_states=True, need_output=False
    )
    return states


def _backward(
    stages: ModuleType,
    x: Tensors,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    prep: Prep,
    states: torch.Tensor,
    seqs: Sequences,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
) -> tuple[torch.Tensor | None, ...]:
    y, adj_states, dh0 = stages.adj(do, x.beta, prep, seqs, dht=dht, need_dh0=wanted[5])
    if not any((*wanted[:5], *wanted[6:])):
        return None, None, None, None, None, dh0, None, None
    dq, dk, dv, dbeta, dg, partials = stages.out(
        x.q,
        x.k,
        x.v,
        x.g,
        x.gate(call),
        do,
        y,
        x.beta,
        prep,
        states,
        adj_states,
        seqs,
        scale=call.scale,
        l2norm=call.l2norm,
        states_edge=has_state,
        adj_edge=dht is not None,
    )
    da_log, dbias = None, None
    if wanted[6] or wanted[7]:
        sums = stages.reduce(partials)
        da_log, dbias = (
            None if given is None else total.to(given.dtype)
            for given, total in zip((x.a_log, x.bias), sums, strict=True)
        )
    return dq, dk, dv, dg, dbeta.to(x.beta.dtype), dh0, da_log, dbias


def _empty_gradients(
    x: Tensors, dht: torch.Tensor | None, seqs: Sequences
) -> tuple[torch.Tensor | None, ...]:
    """Of a call without tokens: the state passed through, and so does its gradient."""
    tokens = (given.new_empty(given.shape) for given in (x.q, x.k, x.v, x.g, x.beta))
    dh0 = x.v.new_zeros(x.state_shape(seqs), dtype=FP32) if dht is None else dht.clone()
    parameters = (None if given is None else torch.zeros_like(given) for given in (x.a_log, x.bias))
    return (*tokens, dh0, *parameters)
