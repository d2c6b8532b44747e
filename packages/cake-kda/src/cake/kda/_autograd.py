"""One call of the op as a node of autograd: what is saved, what is recomputed, which gradients are made.

Every forward saves its inputs. The tape "states" adds the states before each chunk; the backward runs
`prep` again, whose results are twice as large. "all" adds those too. With "inputs" the backward runs `prep`
and `scan` again. A call that is cut keeps the maps of its segments with the states. The bits are the same by
construction.

Here the stages run one by one; where kernels run them, `_run` plays what they recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch

from cake.core.calls import Planned, differentiated_once
from cake.core.checks import check_saved, saved_as
from cake.core.gradients import layout_of
from cake.core.launch import loadable, running_on
from cake.core.recording import Recording, empty
from cake.core.segments import LEAST, Segments
from cake.core.sequences import Sequences
from cake.kda import _stages
from cake.kda._route import Route
from cake.kda._stages import Gate, Prep

FP32 = torch.float32
INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
MAPS = ("m", "live")


class Tensors(NamedTuple):
    """A call's inputs; a_log and bias where the gate is computed in the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    a_log: torch.Tensor | None
    bias: torch.Tensor | None

    def gate(self, call: Call) -> Gate | None:
        if not call.use_gate:
            return None
        a_log, bias = (None if x is None else x.contiguous() for x in (self.a_log, self.bias))
        return Gate(a_log, bias, call.lower_bound)

    def state_shape(self, seqs: Sequences) -> tuple[int, ...]:
        return seqs.n, self.v.shape[2], self.q.shape[3], self.v.shape[3]


@dataclass(frozen=True)
class Call(Planned):
    """What a call is besides its tensors.

    use_gate: g is a raw gate; lower_bound: of that gate.
    beta_scale: where kernels run the call and beta holds logits, the factor of their sigmoid.
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
    # What is walked in place of whole sequences, if the call is cut.
    segments: Segments | None = None
    beta_scale: float | None = None
    # Of all calls like this one.
    recordings: dict[Any, Recording] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def played(self) -> bool:
        """Whether kernels run it."""
        return self.route.backend == "cuda" and self.seqs.total > 0

    @cached_property
    def tape(self) -> str:
        """What a forward leaves for its backward."""
        return self.route.tape

    @property
    def least(self) -> float | None:
        """Log of the decay below which a pre-scan looks no further back; None where states may grow."""
        return LEAST[self.route.variant] if self.l2norm else None


class Walk(NamedTuple):
    """What a forward walk leaves for the backward.

    states: the tape, None unless it is saved. maps: M of the segments and which of them count, if the call is
    cut.
    """

    prep: Prep
    states: Any
    maps: tuple[torch.Tensor, ...] = ()


def run(tensors: Tensors, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow."""
    if call.differentiable:
        apply: Any = _KimiDeltaAttention.apply
        o, final_state = apply(*tensors, call)
    else:
        o, final_state, _ = forward(tensors, call, save_states=False)
    return o, final_state


class _KimiDeltaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *inputs, call = arguments
        tensors = Tensors(*inputs)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.has_state = call, tensors.initial_state is not None
        ctx.layout = layout_of(tensors.q, tensors.k, tensors.v, tensors.beta, tensors.g)
        tape = call.route.tape
        o, final_state, walk = forward(tensors, call, save_states=tape != "inputs")
        # Boundaries on the device are saved too: refilled in place before the backward, they raise there.
        saved: dict[str, torch.Tensor | None] = dict(zip(INPUTS, tensors, strict=True))
        if tape != "inputs":
            # Only walking again needs its values; the rest of the backward needs to know that it was there.
            saved["initial_state"] = None
        saved["cu_seqlens"] = call.seqs.cu_device
        if walk is not None and tape != "inputs":
            saved["states"] = walk.states
            saved |= dict(zip(MAPS, walk.maps, strict=False))
            if tape == "all":
                saved |= walk.prep._asdict()
        ctx.names = tuple(saved)
        ctx.saved_as = saved_as(saved.values())
        ctx.save_for_backward(*saved.values())
        return o, final_state

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        if do is None and dht is None:
            return (None,) * (len(INPUTS) + 1)
        wanted, every = ctx.needs_input_grad, ctx.saved_tensors  # asked once: a checkpoint unpacks each time
        saved = dict(zip(ctx.names, every, strict=True))
        _check_saved(ctx.names, every, ctx.saved_as)
        tensors = Tensors(*[saved[name] for name in INPUTS])
        call = call.at(saved["cu_seqlens"])
        prep = None
        if "t" in saved:
            prep = Prep(**{name: saved[name] for name in Prep._fields})
        maps = tuple(saved[name] for name in MAPS if name in saved)
        states = saved.get("states")
        grads = backward(tensors, prep, states, maps, do, dht, call.seqs, call, wanted, ctx.has_state)
        if ctx.layout is not None:
            dq, dk, dv, dg, dbeta, *rest = grads
            grads = (*_in_order(ctx.layout.place(dq, dk, dv, dbeta, dg)), *rest)
        return (*(x if need else None for x, need in zip(grads, wanted, strict=False)), None)


def _in_order(into: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, dbeta, dg = into
    return dq, dk, dv, dg, dbeta


def _check_saved(names: Sequence[str], saved: Sequence[torch.Tensor | None], made: list[Any]) -> None:
    if saved_as(saved) == made:
        return
    for name, x, extents in zip(names, saved, made, strict=True):
        if x is not None and extents is not None:
            check_saved(name, x, *extents)


def forward(
    x: Tensors, call: Call, *, save_states: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Walk | None]:
    """Output, final state, and what the walk leaves; None without tokens."""
    seqs = call.seqs
    if not seqs.total:
        final_state = None
        if call.output_final_state and x.initial_state is None:
            final_state = x.v.new_zeros(x.state_shape(seqs), dtype=FP32)
        elif call.output_final_state and x.initial_state is not None:
            final_state = x.initial_state.clone(memory_format=torch.contiguous_format)
        return x.v.new_empty(x.v.shape), final_state, None
    stages = _stages.stages(call.route.backend)
    with running_on(x.v.device):
        prep = prepare(stages, x, call, seqs)
        return walk_forward(
            stages,
            x,
            prep,
            seqs,
            call,
            output_final_state=call.output_final_state,
            save_states=save_states,
        )


def backward(
    x: Tensors,
    prep: Prep | None,
    states: torch.Tensor | None,
    maps: tuple[torch.Tensor, ...],
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    seqs: Sequences,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the inputs; what of `prep`, `states` and `maps` isn't there is made again."""
    if not seqs.total:
        return _empty_gradients(x, dht, seqs)
    do = x.v.new_zeros(x.v.shape) if do is None else loadable(do)
    stages = _stages.stages(call.route.backend)
    with running_on(x.v.device):
        walk = walk_of(stages, x, prep, states, maps, seqs, call)
        grads = walk_backward(stages, x, do, dht, walk, seqs, call, wanted, has_state)
    return tuple(_in_dtypes(grads, x))


def walk_of(
    stages: ModuleType,
    x: Tensors,
    prep: Prep | None,
    states: torch.Tensor | None,
    maps: tuple[torch.Tensor, ...],
    seqs: Sequences,
    call: Call,
) -> Walk:
    """The walk of a forward from what is left of it."""
    prep = prepare(stages, x, call, seqs) if prep is None else prep
    if states is None:
        return walk_forward(stages, x, prep, seqs, call, save_states=True, need_output=False)[2]
    if call.segments is not None and not maps:
        _, *made = maps_of(stages, x, prep, call.segments, call)
        maps = tuple(made)
    return Walk(prep, states, maps)


def prepare(stages: ModuleType, x: Tensors, call: Call, seqs: Sequences) -> Prep:
    prep: Prep = stages.prep(
        x.q, x.k, x.g, x.gate(call), x.beta, call.segments or seqs, scale=call.scale, l2norm=call.l2norm
    )
    return prep


def maps_of(
    stages: ModuleType, x: Tensors, prep: Prep, cut: Segments, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B and M of the segments of a call, and which of M count."""
    initial_state = None if x.initial_state is None else x.initial_state.contiguous()
    b, m, live = stages.transfer(x.v, x.beta, prep, cut, initial_state=initial_state, least=call.least)
    return b, m, live


def walk_forward(
    stages: ModuleType, x: Tensors, prep: Prep, seqs: Sequences, call: Call, **asked: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Walk]:
    """What a forward and a backward without a tape have in common. `asked`: as of `scan`."""
    cut, entering = call.segments, {}
    maps: tuple[torch.Tensor, ...] = ()
    if cut is not None:
        b, m, live = maps_of(stages, x, prep, cut, call)
        maps = m, live
        entering["entering"] = stages.chain(b, m, live, prep, cut)
    o, final_state, states = stages.scan(
        x.v,
        x.beta,
        prep,
        cut or seqs,
        initial_state=None if x.initial_state is None else x.initial_state.contiguous(),
        **entering,
        **asked,
    )
    return o, final_state, Walk(prep, states, maps)


def walk_backward(
    stages: ModuleType,
    x: Tensors,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    walk: Walk,
    seqs: Sequences,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
    into: Sequence[torch.Tensor] | None = None,
) -> Sequence[torch.Tensor | None]:
    """Gradients of the inputs that are wanted, those of the gate's parameters in fp32.

    into: memory for those of q, k, v, beta and g.
    """
    cut, prep, leaving = call.segments, walk.prep, {}
    if dht is not None:
        dht = dht.contiguous()
    if cut is not None:
        m, live = walk.maps
        b = stages.adj_transfer(do, x.beta, prep, cut, live, dht=dht, least=call.least)
        leaving["leaving"] = stages.chain(b, m, live, prep, cut, adjoint=True)
    needed = any((*wanted[:5], *wanted[6:]))
    if into is None and needed:
        into = [empty(given.shape, given.dtype, given.device) for given in (x.q, x.k, x.v, x.beta, x.g)]
    y = None if into is None else into[2]
    y, adj_states, dh0 = stages.adj(
        do, x.beta, prep, cut or seqs, dht=dht, need_dh0=wanted[5], y=y, **leaving
    )
    if not needed:
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
        walk.states,
        adj_states,
        cut or seqs,
        scale=call.scale,
        l2norm=call.l2norm,
        states_edge=has_state or cut is not None,
        adj_edge=dht is not None or cut is not None,
        into=into,
    )
    da_log, dbias = None, None
    if wanted[6] or wanted[7]:
        da_log, dbias = stages.reduce(partials)
    grads = (dq, dk, dv, dg, dbeta, dh0, da_log, dbias)
    return [grad if need else None for grad, need in zip(grads, wanted, strict=False)]


def _in_dtypes(grads: Sequence[torch.Tensor | None], x: Tensors) -> list[torch.Tensor | None]:
    return [
        grad if grad is None or given is None or grad.dtype is given.dtype else grad.to(given.dtype)
        for grad, given in zip(grads, x, strict=True)
    ]


def _empty_gradients(
    x: Tensors, dht: torch.Tensor | None, seqs: Sequences
) -> tuple[torch.Tensor | None, ...]:
    """Of a call without tokens: the state passed through, and so does its gradient."""
    tokens = (given.new_empty(given.shape) for given in (x.q, x.k, x.v, x.g, x.beta))
    dh0 = x.v.new_zeros(x.state_shape(seqs), dtype=FP32) if dht is None else dht.clone()
    parameters = (None if given is None else torch.zeros_like(given) for given in (x.a_log, x.bias))
    return (*tokens, dh0, *parameters)
