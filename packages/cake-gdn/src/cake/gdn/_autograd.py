"""One call of the op as a node of autograd: what is saved, what is recomputed, which gradients are made.

With `recompute_state` off the forward saves q, k, v, beta, its `Prep` and the tape of states; with it on, its
inputs alone, and the backward runs the same `prep` and `scan` again: the bits are the same by construction.

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
from cake.core.gradients import Layout, layout_of
from cake.core.launch import loadable, running_on
from cake.core.recording import Recording, empty
from cake.core.segments import Segments
from cake.core.tables import plan_words
from cake.gdn import _segments, _stages
from cake.gdn._route import Route
from cake.gdn._stages import Prep
from cake.gdn.plan import CHUNK, Sequences

BF16, FP32 = torch.bfloat16, torch.float32


class Inputs(NamedTuple):
    """Extents of a call's inputs.

    layout: where gradients of q, k, v, beta and g are to lie; None if contiguously.
    """

    q_shape: torch.Size
    v_shape: torch.Size
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    device: torch.device
    layout: Layout | None = None

    def state_shape(self, seqs: Sequences) -> tuple[int, ...]:
        return seqs.n, self.v_shape[2], self.q_shape[3], self.v_shape[3]


class Walk(NamedTuple):
    """What a forward walk leaves for the backward.

    states: the tape. maps: M of the segments and which of them count, if the call is cut.
    """

    prep: Prep
    states: Any
    maps: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Call(Planned):
    """What a call is besides its tensors."""

    seqs: Sequences
    scale: float
    l2norm: bool
    output_final_state: bool
    route: Route
    # Whether a backward can follow.
    differentiable: bool
    # What is walked in place of whole sequences, if the call is cut.
    segments: Segments | None = None
    # Where kernels run the call and beta holds logits, the factor of their sigmoid.
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
        return "inputs" if self.route.recompute_state else "states"

    @property
    def least(self) -> float | None:
        """Log of the decay below which a pre-scan looks no further back; None where states may grow."""
        return _segments.LEAST[self.route.variant] if self.l2norm else None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and final state (None unless asked for), on the graph if a backward can follow."""
    if call.differentiable:
        apply: Any = _GatedDeltaRule.apply
        o, final_state = apply(q, k, v, g, beta, initial_state, call)
    else:
        o, final_state, _ = _forward(q, k, v, g, beta, initial_state, call, save_states=False)
    return o, final_state


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        o, final_state, tape = forward(q, k, v, g, beta, initial_state, call)
        ctx.call, ctx.has_state = call, initial_state is not None
        ctx.inputs = Inputs(q.shape, v.shape, g.dtype, beta.dtype, v.device, layout_of(q, k, v, beta, g))
        # Boundaries on the device are saved too: refilled in place before the backward, they raise there.
        saved = (q, k, v, beta, call.seqs.cu_device, *(tape or (g, initial_state)))
        ctx.save_for_backward(*saved)
        ctx.saved_as = saved_as(saved)
        return o, final_state

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if do is None and dht is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        call: Call = ctx.call
        if saved_as(saved) != ctx.saved_as:
            check_tape(saved, ctx.inputs, call, ctx.has_state)
        q, k, v, beta, boundaries, *tape = saved
        wanted, made, has_state = ctx.needs_input_grad, ctx.inputs, ctx.has_state
        grads = backward(q, k, v, beta, tape, do, dht, made, call.at(boundaries), wanted, has_state)
        return (*[x if need else None for x, need in zip(grads, wanted, strict=False)], None)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, ...]]:
    """Output, final state, and the tape: `Prep`, states and maps of segments, or nothing if made again."""
    recompute = call.route.recompute_state
    o, final_state, walk = _forward(q, k, v, g, beta, initial_state, call, save_states=not recompute)
    if recompute or walk is None:
        return o, final_state, ()
    prep = walk.prep
    return o, final_state, (*prep, walk.states, *walk.maps)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    tape: Sequence[Any],
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    made: Inputs,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v, g, beta and the initial state, from its tape, or from (g, initial state)."""
    if not call.seqs.total:
        return _empty_gradients(q, k, v, dht, made, call.seqs)
    do = v.new_zeros(v.shape) if do is None else loadable(do)
    stages = _stages.stages(call.route.backend)
    with running_on(made.device):
        if call.route.recompute_state:
            g, initial_state = tape
            walk = walk_again(stages, q, k, v, beta, g, initial_state, call)
        else:
            walk = Walk(Prep(*tape[:4]), tape[4], tuple(tape[5:]))
        grads = walk_backward(stages, q, k, v, beta, do, dht, walk, made, call, wanted, has_state)
        if made.layout is None or not any(wanted[:5]):
            return grads
        dq, dk, dv, dg, dbeta, dh0 = grads
        return _in_order(made.layout.place(dq, dk, dv, dbeta, dg), dh0)


def _in_order(
    into: Sequence[torch.Tensor | None], dh0: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv, dbeta, dg = into
    return dq, dk, dv, dg, dbeta, dh0


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
    *,
    save_states: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Walk | None]:
    if not call.seqs.total:
        final_state = None
        if call.output_final_state and initial_state is None:
            final_state = v.new_zeros((call.seqs.n, v.shape[2], q.shape[3], v.shape[3]), dtype=FP32)
        elif call.output_final_state and initial_state is not None:
            final_state = initial_state.clone(memory_format=torch.contiguous_format)
        return v.new_empty(v.shape), final_state, None
    stages = _stages.stages(call.route.backend)
    with running_on(v.device):
        return walk_forward(
            stages,
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            call,
            output_final_state=call.output_final_state,
            save_states=save_states,
        )


def walk_forward(
    stages: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
    **asked: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Walk]:
    """What a forward and a backward without a tape have in common. `asked`: as of `scan`."""
    cut, seqs = call.segments, call.segments or call.seqs
    maps: tuple[torch.Tensor, ...] = ()
    states_in = {}
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    prep = stages.prep(k, g, beta, seqs, l2norm=call.l2norm)
    if cut is not None:
        states_in["entering"], *kept = _segments.entering(
            stages, k, v, beta, prep, cut, initial_state, call.least
        )
        maps = tuple(kept)
    o, final_state, states = stages.scan(
        q,
        k,
        v,
        beta,
        prep,
        seqs,
        scale=call.scale,
        l2norm=call.l2norm,
        initial_state=initial_state,
        **states_in,
        **asked,
    )
    return o, final_state, Walk(prep, states, maps)


def walk_again(
    stages: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor,
    initial_state: torch.Tensor | None,
    call: Call,
) -> Walk:
    _, _, walk = walk_forward(
        stages, q, k, v, g, beta, initial_state, call, save_states=True, need_output=False
    )
    return walk


def walk_backward(
    stages: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    do: torch.Tensor,
    dht: torch.Tensor | None,
    walk: Walk,
    made: Inputs,
    call: Call,
    wanted: tuple[bool, ...],
    has_state: bool,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """`into`: memory for the gradients of q, k, v, beta and g."""
    cut, prep, states_in = call.segments, walk.prep, {}
    seqs = cut or call.seqs
    if dht is not None:
        dht = dht.contiguous()
    if cut is not None:
        states_in["leaving"] = _segments.leaving(
            stages, q, k, do, beta, prep, cut, walk.maps, dht, call.scale, call.l2norm, call.least
        )
    if into is None and any(wanted[:5]):
        like = (q, q.dtype), (k, k.dtype), (v, v.dtype), (beta, made.beta_dtype), (beta, made.g_dtype)
        into = [empty(x.shape, dtype, made.device) for x, dtype in like]
    y, adj_states, dh0, rq = stages.adj(
        q,
        k,
        do,
        beta,
        prep,
        seqs,
        scale=call.scale,
        l2norm=call.l2norm,
        dht=dht,
        need_dh0=wanted[5],
        y=None if into is None else into[2],
        **states_in,
    )
    if not any(wanted[:5]):
        return None, None, None, None, None, dh0
    dq, dk, dv, dbeta, dg = stages.out(
        q,
        k,
        v,
        do,
        y,
        beta,
        prep,
        walk.states,
        adj_states,
        rq,
        seqs,
        scale=call.scale,
        l2norm=call.l2norm,
        states_edge=has_state or cut is not None,
        adj_edge=dht is not None or cut is not None,
        into=into,
    )
    return dq, dk, dv, dg, dbeta, dh0


def _empty_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dht: torch.Tensor | None,
    made: Inputs,
    seqs: Sequences,
) -> tuple[torch.Tensor, ...]:
    """Of a call without tokens: the state passed through, and so does its gradient."""
    dg, dbeta = (v.new_empty(v.shape[:3], dtype=dtype) for dtype in (made.g_dtype, made.beta_dtype))
    dh0 = v.new_zeros(made.state_shape(seqs), dtype=FP32) if dht is None else dht.clone()
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, dbeta, dh0


def check_tape(saved: Sequence[Any], made: Inputs, call: Call, has_state: bool) -> None:
    """Refuses what came back from autograd otherwise than it was saved: (q, k, v, beta, boundaries, *tape).

    Raises:
        RuntimeError: naming the tensor.
    """
    q, k, v, beta, boundaries, *tape = saved
    heads, dim, v_heads, v_dim = *made.q_shape[2:], *made.v_shape[2:]
    seqs = call.segments or call.seqs
    expected: list[tuple[str, Any, tuple[int, ...], torch.dtype]] = [
        ("q", q, made.q_shape, BF16),
        ("k", k, made.q_shape, BF16),
        ("v", v, made.v_shape, BF16),
        ("beta", beta, made.v_shape[:3], made.beta_dtype),
    ]
    if boundaries is not None:
        expected.append(("cu_seqlens", boundaries, (call.seqs.n + 1,), boundaries.dtype))
    if call.seqs.total and call.route.recompute_state:
        g, initial_state = tape
        expected.append(("g", g, made.v_shape[:3], made.g_dtype))
        if initial_state is not None:
            expected.append(("initial_state", initial_state, made.state_shape(call.seqs), FP32))
    elif call.seqs.total:
        t, b, rk, plan, states, *maps = tape
        edge = has_state or call.segments is not None
        expected += [
            ("t", t, (v_heads, seqs.total, CHUNK), BF16),
            ("b", b, (v_heads, seqs.total), FP32),
            ("rk", rk, (heads, seqs.total), FP32),
            ("states", states, (seqs.slots(edge), v_heads, v_dim, dim), BF16),
        ]
        if plan is not None:
            expected.append(("plan", plan, (plan_words(seqs),), torch.int32))
        if maps:
            m, live = maps
            expected.append(("m", m, (seqs.n, v_heads, dim, dim), FP32))
            expected.append(("live", live, (seqs.n, v_heads), torch.int32))
    for name, x, shape, dtype in expected:
        check_saved(name, x, shape, dtype, made.device)
