"""The op for tracers, as custom ops of the namespace `cake`: see `cake.core.tracing`.

`cake::gdn` is one call without the activations of gate and beta, which are ops of their own. Under autograd
it saves its inputs and the tape that it returns, and `cake::gdn_backward` makes the gradients. An output that
isn't wanted is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cake.core import config, sequences, tracing
from cake.core.launch import running_on
from cake.gdn import _autograd, _checks, _gates, _route, _segments, _stages
from cake.gdn._autograd import Call, Inputs
from cake.gdn._route import Route
from cake.gdn._shapes import MADE_BY
from cake.gdn._stages import Prep
from cake.gdn.plan import Sequences

FP32 = torch.float32
_WANTED = 6  # q, k, v, g, beta, initial_state


def call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    scale: float,
    l2norm: bool,
    output_final_state: bool,
    beta_scale: float | None,
    variant: str | None,
    recompute_state: bool | None,
    segments: int | None,
    packing_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A traced call: results as of `_autograd.run`. `beta_scale` None: beta is no logit."""
    chosen, recompute = tracing.configured("gdn", variant, "recompute_state", recompute_state)
    boundaries, host = tracing.host_boundaries(cu_seqlens, cu_seqlens_cpu)
    if a_log is not None:
        g = torch.ops.cake.gdn_gate(g, a_log, dt_bias)
    if beta_scale is not None:
        beta = torch.ops.cake.gdn_beta(beta, beta_scale)
    tensors = (q, k, v, g, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, final_state, _ = torch.ops.cake.gdn(
        *tensors,
        boundaries,
        host,
        scale,
        l2norm,
        output_final_state,
        save,
        chosen,
        recompute,
        segments,
        packing_invariant,
        MADE_BY,
    )
    return o, final_state if output_final_state else None


def _call_of(
    seqs: Sequences,
    v_heads: int,
    scale: float,
    l2norm: bool,
    final: bool,
    route: Route,
    segments: int | None,
    packing_invariant: bool,
) -> Call:
    cut = None
    if route.backend != "shapes":
        cut = _segments.cut_of_call(seqs, v_heads, segments, packing_invariant)
    return Call(
        seqs=seqs,
        scale=scale,
        l2norm=l2norm,
        output_final_state=final,
        route=route,
        differentiable=False,
        segments=None if cut is None else tracing.with_room_of(cut, seqs),
    )


def _real_sequences(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, boundaries: Sequence[int] | None
) -> Sequences:
    return tracing.with_room(sequences.of_call(x.shape[0], x.shape[1], x.device, cu_seqlens, boundaries))


@torch.library.custom_op(
    "cake::gdn",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, "
    "SymInt[]? boundaries, float scale, bool l2norm, bool output_final_state, bool save, str variant, "
    "bool recompute_state, int? segments, bool packing_invariant, str made_by='') "
    "-> (Tensor, Tensor, Tensor[])",
)
def gdn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    scale: float,
    l2norm: bool,
    output_final_state: bool,
    save: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    made_by: str = "",
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    _checks.check_alignment(q, k, v)
    seqs = _real_sequences(q, cu_seqlens, boundaries)
    backend = _stages.backend_name(q.device)
    # Asked again: fast may have been forbidden since the call was traced.
    route = Route("single", config.variant("gdn", variant), backend, recompute_state)
    if seqs.total:
        _route.note(route)
    made = _call_of(seqs, v.shape[2], scale, l2norm, output_final_state, route, segments, packing_invariant)
    o, final_state, kept = _forward(q, k, v, g, beta, initial_state, made, save)
    if kept and (made.segments or seqs).boundaries is not None:
        # Room that no state needs: tracers compare and save what an op returns.
        first = 0 if initial_state is not None or made.segments is not None else 1
        counts = (made.segments or seqs).chunk_counts
        kept[-1][sum(max(count - first, 0) for count in counts) :].zero_()
    return o, final_state, kept


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    made: Call,
    save: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    if not save:
        made = replace(made, route=replace(made.route, recompute_state=True))
    o, final_state, tape = _autograd.forward(q, k, v, g, beta, initial_state, made)
    if final_state is None:
        final_state = q.new_empty(0, dtype=FP32)
    # Tables and maps of segments have sizes that no tracer knows; the backward makes them again.
    return o, final_state, [x for x in (*tape[:3], *tape[4:5]) if x is not None]


@gdn.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    scale: float,
    l2norm: bool,
    output_final_state: bool,
    save: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    made_by: str = "",
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    _checks.check_inputs(q, k, v, g, beta)
    seqs = tracing.fake_sequences(q.shape[0], q.shape[1], cu_seqlens, boundaries)
    if initial_state is not None:
        _checks.check_state(initial_state, seqs.n, v.shape[2], q.device)
    route = Route("single", variant, "shapes", recompute_state)
    made = _call_of(seqs, v.shape[2], scale, l2norm, output_final_state, route, segments, packing_invariant)
    return _forward(q, k, v, g, beta, initial_state, made, save)


@torch.library.custom_op(
    "cake::gdn_backward",
    mutates_args=(),
    schema="(Tensor? do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor? initial_state, Tensor? cu_seqlens, SymInt[]? boundaries, Tensor[] tape, float scale, "
    "bool l2norm, str variant, bool recompute_state, int? segments, bool packing_invariant, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def gdn_backward(
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    tape: Sequence[torch.Tensor],
    scale: float,
    l2norm: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    seqs = _real_sequences(q, cu_seqlens, boundaries)
    backend = _stages.backend_name(q.device)
    route = Route("single", variant, backend, recompute_state)
    made = _call_of(seqs, v.shape[2], scale, l2norm, False, route, segments, packing_invariant)
    kept: Sequence[Any] = (g, initial_state)
    if tape:
        stages = _stages.stages(backend)
        walked = made.segments or seqs
        with running_on(v.device):
            plan = stages.tables(walked, v.device) if backend == "cuda" else None
            kept = (*tape[:3], plan, tape[3])
            if made.segments is not None:
                _, *maps = _segments.entering(
                    stages, k, v, beta, Prep(*kept[:4]), made.segments, initial_state, made.least
                )
                kept = (*kept, *maps)
    inputs, has_state = Inputs(q.shape, v.shape, g.dtype, beta.dtype, v.device), initial_state is not None
    _autograd.check_tape((q, k, v, beta, cu_seqlens, *kept), inputs, made, has_state)
    grads = _autograd.backward(q, k, v, beta, kept, do, dht, inputs, made, tuple(wanted), has_state)
    return tuple(
        x if need and x is not None else q.new_empty(0) for x, need in zip(grads, wanted, strict=True)
    )


@gdn_backward.register_fake
def _(
    do: torch.Tensor | None,
    dht: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    boundaries: Sequence[int] | None,
    tape: Sequence[torch.Tensor],
    scale: float,
    l2norm: bool,
    variant: str,
    recompute_state: bool,
    segments: int | None,
    packing_invariant: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    shaped = (q, k, v, g, beta, initial_state)
    return tuple(
        x.new_empty(x.shape) if need and x is not None else q.new_empty(0)
        for x, need in zip(shaped, wanted, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    tensors, boundaries = inputs[: _WANTED + 1], inputs[_WANTED + 1]
    scale, l2norm, _final, _save, variant, *cut, _made_by = inputs[_WANTED + 2 :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2])
    ctx.save_for_backward(*tensors, *output[2])
    ctx.boundaries, ctx.call = boundaries, (scale, l2norm, variant, *cut)


def _backward(
    ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, _tape: Any
) -> tuple[torch.Tensor | None, ...]:
    rest = (None,) * 11
    if do is None and dht is None:
        return (None,) * _WANTED + rest
    saved = ctx.saved_tensors  # asked once: a checkpoint unpacks at every question
    inputs, tape = saved[: _WANTED + 1], saved[_WANTED + 1 :]
    wanted = list(ctx.needs_input_grad[:_WANTED])
    grads = torch.ops.cake.gdn_backward(do, dht, *inputs, ctx.boundaries, list(tape), *ctx.call, wanted)
    return (*(x if need else None for x, need in zip(grads, wanted, strict=True)), *rest)


gdn.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "cake::gdn_gate", mutates_args=(), schema="(Tensor raw, Tensor a_log, Tensor? dt_bias) -> Tensor"
)
def gdn_gate(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    return _gates.gate_forward(raw, a_log, dt_bias)


gdn_gate.register_fake(_gates.gate_forward)


@torch.library.custom_op(
    "cake::gdn_gate_backward",
    mutates_args=(),
    schema="(Tensor dg, Tensor raw, Tensor a_log, Tensor? dt_bias) -> (Tensor, Tensor, Tensor)",
)
def gdn_gate_backward(
    dg: torch.Tensor, raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_raw, d_a_log, d_bias = _gates.gate_backward(dg, raw, a_log, dt_bias)
    return d_raw, d_a_log, d_a_log.new_empty(0) if d_bias is None else d_bias


gdn_gate_backward.register_fake(gdn_gate_backward._init_fn)


def _gate_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, dg: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    d_raw, d_a_log, d_bias = torch.ops.cake.gdn_gate_backward(dg, *ctx.saved_tensors)
    return d_raw, d_a_log, d_bias if ctx.needs_input_grad[2] else None


gdn_gate.register_autograd(_gate_backward, setup_context=_gate_setup)


@torch.library.custom_op("cake::gdn_beta", mutates_args=(), schema="(Tensor logits, float scale) -> Tensor")
def gdn_beta(logits: torch.Tensor, scale: float) -> torch.Tensor:
    return _gates.beta_forward(logits, scale)


gdn_beta.register_fake(_gates.beta_forward)


@torch.library.custom_op(
    "cake::gdn_beta_backward",
    mutates_args=(),
    schema="(Tensor d_beta, Tensor logits, float scale) -> Tensor",
)
def gdn_beta_backward(d_beta: torch.Tensor, logits: torch.Tensor, scale: float) -> torch.Tensor:
    return _gates.beta_backward(d_beta, logits, scale)


gdn_beta_backward.register_fake(_gates.beta_backward)


def _beta_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


def _beta_backward(ctx: Any, d_beta: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.cake.gdn_beta_backward(d_beta, *ctx.saved_tensors, ctx.scale), None


gdn_beta.register_autograd(_beta_backward, setup_context=_beta_setup)
