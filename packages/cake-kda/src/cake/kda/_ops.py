"""The op for tracers, as custom ops of the namespace `cake`: see `cake.core.tracing`.

`cake::kda` is one call without beta's activation, which is an op of its own. Under autograd it saves its
inputs and the states that it returns, and `cake::kda_backward` makes the gradients; the tape "all" counts as
"states". An output that isn't wanted is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cake.core import config, sequences, tracing
from cake.core.sequences import Sequences
from cake.kda import _autograd, _checks, _gates, _route, _segments, _stages
from cake.kda._autograd import Call, Tensors
from cake.kda._route import Route
from cake.kda._shapes import MADE_BY

FP32 = torch.float32
_WANTED = 8  # q, k, v, g, beta, initial_state, A_log, dt_bias


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
    *,
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    output_final_state: bool,
    beta_scale: float | None,
    variant: str | None,
    disable_recompute: bool,
    recompute_state: bool | None,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A traced call: results as of `_autograd.run`. `beta_scale` None: beta is no logit."""
    chosen, recompute = tracing.configured("kda", variant, "recompute_state", recompute_state)
    if disable_recompute:
        recompute = False
    boundaries, host = tracing.host_boundaries(cu_seqlens, cu_seqlens_cpu)
    if beta_scale is not None:
        beta = torch.ops.cake.kda_beta(beta, beta_scale)
    tensors = (q, k, v, g, beta, initial_state, a_log, bias)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, final_state, _ = torch.ops.cake.kda(
        *tensors,
        boundaries,
        host,
        scale,
        l2norm,
        use_gate,
        lower_bound,
        output_final_state,
        save and not recompute,
        chosen,
        recompute,
        segments,
        packing_invariant,
        backend,
        MADE_BY,
    )
    return o, final_state if output_final_state else None


def _call_of(
    seqs: Sequences,
    v_heads: int,
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    final: bool,
    variant: str,
    recompute: bool,
    segments: int | None,
    packing_invariant: bool,
    backend: str,
) -> Call:
    cut = None
    if backend != "shapes":
        cut = _segments.cut_of_call(seqs, v_heads, segments, packing_invariant)
    return Call(
        seqs=seqs,
        scale=scale,
        l2norm=l2norm,
        use_gate=use_gate,
        lower_bound=lower_bound,
        output_final_state=final,
        route=Route("single", variant, backend, "inputs" if recompute else "states"),
        differentiable=False,
        segments=None if cut is None else tracing.with_room_of(cut, seqs),
    )


def _real_sequences(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, boundaries: Sequence[int] | None, backend: str
) -> Sequences:
    seqs = sequences.of_call(x.shape[0], x.shape[1], x.device, cu_seqlens, boundaries)
    _checks.check_readable(seqs, backend)
    return seqs


@torch.library.custom_op(
    "cake::kda",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? a_log, "
    "Tensor? bias, Tensor? cu_seqlens, SymInt[]? boundaries, float scale, bool l2norm, bool use_gate, "
    "float? lower_bound, bool output_final_state, bool save, str variant, bool recompute_state, "
    "int? segments, bool packing_invariant, str? backend, str made_by='') -> (Tensor, Tensor, Tensor[])",
)
def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    output_final_state: bool,
    save: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
    made_by: str = "",
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    _checks.check_alignment(("q", q), ("k", k), ("v", v), ("g", g))
    found = _stages.backend_name(q.device, backend)
    seqs = _real_sequences(q, cu_seqlens, boundaries, found)
    # Asked again: fast may have been forbidden since the call was traced.
    variant = config.variant("kda", variant)
    seqs = tracing.with_room(seqs)
    made = _call_of(
        seqs,
        v.shape[2],
        scale,
        l2norm,
        use_gate,
        lower_bound,
        output_final_state,
        variant,
        recompute_state,
        segments,
        packing_invariant,
        found,
    )
    if seqs.total:
        _route.note(made.route)
    o, final_state, kept = _forward(Tensors(q, k, v, g, beta, initial_state, a_log, bias), made, save)
    walked = made.segments or seqs
    if kept and walked.boundaries is not None:
        # Room that no state needs: tracers compare and save what an op returns.
        first = 0 if initial_state is not None or made.segments is not None else 1
        kept[-1][sum(max(count - first, 0) for count in walked.chunk_counts) :].zero_()
    return o, final_state, kept


def _forward(
    tensors: Tensors, made: Call, save: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    o, final_state, walk = _autograd.forward(tensors, made, save_states=save)
    if final_state is None:
        final_state = o.new_empty(0, dtype=FP32)
    # Maps of segments have sizes that no tracer knows; the backward makes them again.
    return o, final_state, [walk.states] if save and walk is not None else []


@kda.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    output_final_state: bool,
    save: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
    made_by: str = "",
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    _checks.check_inputs(q, k, v, g, beta)
    seqs = tracing.fake_sequences(q.shape[0], q.shape[1], cu_seqlens, boundaries)
    if initial_state is not None:
        _checks.check_state(initial_state, seqs.n, v.shape[2], q.device)
    made = _call_of(
        seqs,
        v.shape[2],
        scale,
        l2norm,
        use_gate,
        lower_bound,
        output_final_state,
        variant,
        recompute_state,
        segments,
        packing_invariant,
        "shapes",
    )
    return _forward(Tensors(q, k, v, g, beta, initial_state, a_log, bias), made, save)


@torch.library.custom_op(
    "cake::kda_backward",
    mutates_args=(),
    schema="(Tensor? do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor? initial_state, Tensor? a_log, Tensor? bias, Tensor? cu_seqlens, SymInt[]? boundaries, "
    "Tensor[] tape, float scale, bool l2norm, bool use_gate, float? lower_bound, str variant, "
    "bool recompute_state, int? segments, bool packing_invariant, str? backend, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def kda_backward(
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    tape: Sequence[torch.Tensor],
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    found = _stages.backend_name(q.device, backend)
    seqs = _real_sequences(q, cu_seqlens, boundaries, found)
    made = _call_of(
        seqs,
        v.shape[2],
        scale,
        l2norm,
        use_gate,
        lower_bound,
        False,
        variant,
        recompute_state,
        segments,
        packing_invariant,
        found,
    )
    walked, edge = made.segments or seqs, initial_state is not None or made.segments is not None
    *grads, da_log, dbias = _autograd.backward(
        Tensors(q, k, v, g, beta, initial_state, a_log, bias),
        None,
        tape[0][: walked.slots(edge)] if tape else None,
        (),
        do,
        dht,
        seqs,
        made,
        tuple(wanted),
        initial_state is not None,
    )
    # These two are parts of one sum, and an op's outputs share no memory.
    grads += [None if x is None else x.clone(memory_format=torch.contiguous_format) for x in (da_log, dbias)]
    return tuple(
        x if need and x is not None else q.new_empty(0) for x, need in zip(grads, wanted, strict=True)
    )


@kda_backward.register_fake
def _(
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    tape: Sequence[torch.Tensor],
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    shaped = (q, k, v, g, beta, initial_state, a_log, bias)
    return tuple(
        x.new_empty(x.shape) if need and x is not None else q.new_empty(0)
        for x, need in zip(shaped, wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    tensors, boundaries = inputs[: _WANTED + 1], inputs[_WANTED + 1]
    scale, l2norm, use_gate, lower_bound, _final, _save, variant, *rest, _made_by = inputs[_WANTED + 2 :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2])
    ctx.save_for_backward(*tensors, *output[2])
    ctx.boundaries = boundaries
    ctx.call = (scale, l2norm, use_gate, lower_bound, variant, *rest)


def _backward(
    ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, _tape: Any
) -> tuple[torch.Tensor | None, ...]:
    rest = (None,) * 14
    if do is None and dht is None:
        return (None,) * _WANTED + rest
    saved = ctx.saved_tensors  # asked once: a checkpoint unpacks at every question
    inputs, tape = saved[: _WANTED + 1], saved[_WANTED + 1 :]
    wanted = list(ctx.needs_input_grad[:_WANTED])
    grads = torch.ops.cake.kda_backward(do, dht, *inputs, ctx.boundaries, list(tape), *ctx.call, wanted)
    return (*(x if need else None for x, need in zip(grads, wanted, strict=True)), *rest)


kda.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("cake::kda_beta", mutates_args=(), schema="(Tensor logits, float scale) -> Tensor")
def kda_beta(logits: torch.Tensor, scale: float) -> torch.Tensor:
    return _gates.beta_forward(logits, scale)


kda_beta.register_fake(_gates.beta_forward)


@torch.library.custom_op(
    "cake::kda_beta_backward",
    mutates_args=(),
    schema="(Tensor d_beta, Tensor logits, float scale) -> Tensor",
)
def kda_beta_backward(d_beta: torch.Tensor, logits: torch.Tensor, scale: float) -> torch.Tensor:
    return _gates.beta_backward(d_beta, logits, scale)


kda_beta_backward.register_fake(_gates.beta_backward)


def _beta_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _beta_backward(ctx: Any, d_beta: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.cake.kda_beta_backward(d_beta, *ctx.saved_tensors, ctx.scale), None


kda_beta.register_autograd(_beta_backward, setup_context=_beta_setup)
