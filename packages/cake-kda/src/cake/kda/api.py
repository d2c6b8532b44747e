"""The public entry point of the op: its signature, its documentation, and what decides a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cake.core import config, cp, sequences, tracing
from cake.core.calls import Memo, key_of, near_key_of
from cake.core.checks import check_number, check_tensor
from cake.core.launch import ALIGNMENT
from cake.core.recording import Otherwise
from cake.core.sequences import CHUNK
from cake.kda import _autograd, _gates, _kcp, _run, _segments, _stages
from cake.kda._checks import (
    HEAD_DIM,
    check_alignment,
    check_bound,
    check_gate,
    check_inputs,
    check_readable,
    check_state,
    check_tape,
)
from cake.kda._route import Route, Tape, last_route

__all__ = ["Route", "chunk_kda", "kcp_chunk_kda", "last_route"]


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    variant: str | None = None,
    recompute_state: bool | None = None,
    segments: int | None = None,
    packing_invariant: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over sequences of tokens, differentiable.

    With decays a = exp(g) of the K key channels, state S [K, V] and q, k after the L2 norm, each token of a v
    head does

        S <- diag(a) S      S <- S + k (beta (v - S^T k))^T      o = scale S^T q

    Args:
        q: bf16 `[B, T, H, 128]`. q, k, v and g may be strided views, say of one fused projection: their last
            dimension must be contiguous, and on a GPU every address and stride a multiple of 16 bytes.
        k: bf16 `[B, T, H, 128]`.
        v: bf16 `[B, T, HV, 128]`, HV a multiple of H: v head h reads q/k head h // (HV / H).
        g: log decay of each key channel, natural log, at most 0: `[B, T, HV, 128]`, fp32 or bf16. Any value
            is served, mixed as it comes; one below -88 counts as -88. With `use_gate_in_kernel` the raw gate.
        beta: `[B, T, HV]`, fp32 or bf16, any strides. With `use_beta_sigmoid_in_kernel` its logits instead.
        scale: default 128^-0.5.
        initial_state: fp32 `[N, HV, K, V]`, one for each sequence; zero by default. Copied unless contiguous.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: use q / sqrt(sum q^2 + 1e-6) and k alike.
        use_gate_in_kernel: make the log decay of x = g + dt_bias: -exp(A_log) softplus(x), or with a
            `lower_bound` lower_bound sigmoid(exp(A_log) x).
        use_beta_sigmoid_in_kernel: use sigmoid(beta).
        allow_neg_eigval: use 2 sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
        safe_gate: the caller's word that no log decay is below `lower_bound`, which then lies in [-5, 0) and
            is needed with `use_gate_in_kernel`; -5 by default without. It may let a backend run faster. A g
            that breaks it gets the right result all the same, never a NaN: nothing is assumed of g that its
            values don't bear out.
        lower_bound: of the gate that `use_gate_in_kernel` makes, below 0, with or without `safe_gate`.
            Without `use_gate_in_kernel` it is a part of the caller's word and changes no result.
        disable_recompute: keep everything that the backward needs. By default it makes some of it again.
        return_intermediate_states: not served.
        state_v_first: initial and final states are `[N, HV, V, K]`; a transposing copy each way.
        cu_seqlens: boundaries of packed sequences (B = 1): N + 1 values from 0 to T, int32 or int64, empty
            sequences allowed. On a GPU they are never read back, and `backend="torch"` needs them on the
            host. A CPU tensor is checked and used as `cu_seqlens_cpu`.
        cu_seqlens_cpu: the same as a CPU tensor or a list of ints: checked, and no synchronisation. Used
            in place of `cu_seqlens` when both are given.
        cp_context: a `KcpContext` (see `build_kcp_context`) or flash-linear-attention's `FLACPContext`: the
            inputs are this rank's tokens of a pack that lies on several ranks. Its boundaries replace
            `cu_seqlens` and `cu_seqlens_cpu`; every rank of its group makes the same call, and the same
            backward.
        use_graph: not served.
        max_num_seqs: belongs to `use_graph`.
        A_log: `[HV]`, fp32 or bf16; needed by `use_gate_in_kernel` unless there is a `lower_bound`, when None
            counts as 0. With a bound a value above 30 counts as 30.
        dt_bias: `[HV * 128]` or `[HV, 128]`, fp32 or bf16; zero by default.
        chunk_size: 64 alone.
        transpose_state_layout: the older name of `state_v_first`.
        variant: "det" or "fast" for this call in place of the configured one.
        recompute_state: for this call in place of the configured `--cake-kda-recompute-state`.
        segments: into how many segments of whole chunks each sequence is cut, to be walked at once: 1 for
            none, at most its chunks, and more where one would be longer than 128 chunks. By default
            `cake.core.segments.plan` decides, from the lengths and HV alone; where the boundaries of several
            sequences are on the GPU alone, T, N and HV leave a few plans, of which the GPU takes one by them:
            it may give other bits than `plan` would. Beta from 0 to 2 is taken for granted where a call with
            `use_qk_l2norm_in_kernel` is cut, and that a chunk whose every channel decays below e^-5 leaves no
            more than that of any state.
        packing_invariant: plan each sequence as if it were alone in the call. Of several sequences the host
            must know the boundaries.
        backend: None, or "torch" for the reference backend on tensors of any device, which on a GPU is far
            from fast.

    Returns:
        o, bf16 `[B, T, HV, 128]`, and the final state, fp32 and laid out like `initial_state`, or None.
        Without tokens o is empty and the state passes through.

    Raises:
        TypeError: not a tensor or a number, a wrong dtype, an unknown argument.
        ValueError: a wrong shape, device or stride, boundaries that don't fit, arguments that contradict each
            other; also an initial or final state under a context.
        NotImplementedError: tensors on a GPU that isn't sm_90 without `backend="torch"`, `segments` under
            `cp_context`, `return_intermediate_states`, `use_graph`, another chunk size. Every check comes
            before any launch.

    Gradients: for q, k, v, g, beta, A_log, dt_bias and initial_state, in their dtypes, where asked for. A
    loss on either result alone works; an unused final state leaves every bit as it is. A gradient of o whose
    last dimension isn't contiguous (as `o.sum().backward()` makes one) is copied once. A call keeps its
    inputs for the backward: changing them in place before it raises there.
    Gradients of views that `cake.core.split_projection` made of one tensor are parts of one tensor, too.
    Gradients of gradients raise, as do tangents of forward-mode differentiation on a GPU or under a context.

    Determinism: under det the same inputs give the same bits in every call, process and thread, whether
    states are saved or recomputed. A sequence's bits don't depend on its neighbours in the pack as long as it
    is cut alike; with `packing_invariant` it always is, which can take up to about one and a half times as
    long in packs that fill the GPU anyway. Another number of segments gives other bits within the same
    errors. (Gradients of A_log and dt_bias are sums over the pack.)
    """
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    near = None
    if cp_context is None and not tracing.traced():
        # A call that differs in nothing from one that passed every check, but for what its recording sees.
        given = (
            scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, state_v_first,
            disable_recompute, return_intermediate_states, chunk_size, transpose_state_layout, variant,
            recompute_state, segments, packing_invariant, backend, use_graph, max_num_seqs,
        )  # fmt: skip
        near = near_key_of(tensors, cu_seqlens, cu_seqlens_cpu, given)
        call = None if near is None else _calls.get(near)
        if call is not None:
            try:
                return _run.run(tensors, call, cu_seqlens, state_v_first or bool(transpose_state_layout))
            except Otherwise:
                pass  # another one's, or one that is refused

    if cp_context is not None:
        cp.refuse_states(initial_state, output_final_state)
    if return_intermediate_states:
        raise NotImplementedError("return_intermediate_states isn't served: leave it False, got True")
    if use_graph:
        raise NotImplementedError("use_graph isn't served: leave it False, got True")
    if max_num_seqs is not None:
        raise ValueError(f"max_num_seqs is used by use_graph=True alone, got {max_num_seqs}")
    if chunk_size != CHUNK:
        raise NotImplementedError(f"chunk_size must be {CHUNK}, got {chunk_size}")
    if transpose_state_layout is not None:
        if state_v_first:
            raise ValueError("state_v_first and its older name transpose_state_layout are given both")
        state_v_first = transpose_state_layout
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    scale = HEAD_DIM**-0.5 if scale is None else check_number("scale", scale)
    lower_bound = check_bound(lower_bound, use_gate_in_kernel, safe_gate)

    if tracing.traced() and cp_context is None:
        from cake.kda import _ops

        check_tape(disable_recompute, recompute_state)
        dt_bias = check_gate(use_gate_in_kernel, A_log, dt_bias, lower_bound, v.shape[2], q.device)
        if state_v_first and initial_state is not None:
            initial_state = initial_state.transpose(-1, -2)
        o, final_state = _ops.call(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            A_log,
            dt_bias,
            cu_seqlens,
            cu_seqlens_cpu,
            scale=scale,
            l2norm=bool(use_qk_l2norm_in_kernel),
            use_gate=bool(use_gate_in_kernel),
            lower_bound=lower_bound,
            output_final_state=bool(output_final_state),
            beta_scale=_gates.beta_scale(allow_neg_eigval) if use_beta_sigmoid_in_kernel else None,
            variant=variant,
            disable_recompute=bool(disable_recompute),
            recompute_state=recompute_state,
            segments=segments,
            packing_invariant=bool(packing_invariant),
            backend=backend,
        )
        if state_v_first and final_state is not None:
            final_state = final_state.transpose(-1, -2).contiguous()
        return o, final_state

    settings: tuple[Any, ...] = (
        scale,
        bool(use_qk_l2norm_in_kernel),
        bool(use_gate_in_kernel),
        lower_bound,
        bool(output_final_state),
        state_v_first,
        variant,
        disable_recompute,
        recompute_state,
        segments,
        packing_invariant,
        backend,
        _gates.beta_scale(allow_neg_eigval) if use_beta_sigmoid_in_kernel else None,
    )
    context = None
    if cp_context is None:
        key = key_of(tensors, cu_seqlens, cu_seqlens_cpu, settings)
    else:
        check_tensor("q", q)
        context = cp.of_call(cp_context, q.device)
        # Plans are made once for all contexts of the same content.
        key = key_of(tensors, None, None, (*settings, context.path, context.plan))
    call = None if key is None else _calls.get(key)
    if call is None:
        call = _call_of(*tensors, cu_seqlens, cu_seqlens_cpu, context, *settings)
        if key is not None:
            call = _calls.keep(key, call.at(None))
    elif (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr()) % ALIGNMENT:
        check_alignment(("q", q), ("k", k), ("v", v), ("g", g))

    if near is not None and call.played:
        # Nothing lies between the arguments and the recording, which sees all of their metadata.
        _calls.keep(near, call)
    if context is None and call.played:
        return _run.run(tensors, call, cu_seqlens, state_v_first)

    if use_beta_sigmoid_in_kernel:
        beta = _gates.beta_sigmoid(beta, allow_neg_eigval)
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    if context is not None:
        return _kcp.run(_run.by_head(tensors), call, context), None
    return _run.run(tensors, call, cu_seqlens, state_v_first)


# What is known of calls by their metadata: every check has passed, and the plan is made.
_calls: Memo[_autograd.Call] = Memo()


def _call_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None,
    context: cp.Call | None,
    scale: float,
    l2norm: bool,
    use_gate: bool,
    lower_bound: float | None,
    output_final_state: bool,
    state_v_first: bool,
    variant: str | None,
    disable_recompute: bool,
    recompute_state: bool | None,
    segments: int | None,
    packing_invariant: bool,
    backend: str | None,
    beta_scale: float | None,
) -> _autograd.Call:
    """Every check of a call, and what it is besides its tensors."""
    check_inputs(q, k, v, g, beta)
    check_alignment(("q", q), ("k", k), ("v", v), ("g", g))
    device, v_heads = q.device, v.shape[2]
    check_gate(use_gate, a_log, dt_bias, lower_bound, v_heads, device)
    if context is None:
        seqs = sequences.of_call(q.shape[0], q.shape[1], device, cu_seqlens, cu_seqlens_cpu)
    else:
        seqs = context.sequences(q.shape[0], q.shape[1])
    if initial_state is not None:
        check_state(initial_state, seqs.n, v_heads, device, ("V", "K") if state_v_first else ("K", "V"))
    route = Route(
        path="single" if context is None else context.path,
        variant=_variant(variant, context),
        backend=_stages.backend_name(device, backend),
        tape=_tape(disable_recompute, recompute_state),
    )
    check_readable(seqs, route.backend)
    cut = None
    if context is None:
        cut = _segments.cut_of_call(seqs, v_heads, segments, packing_invariant)
    elif segments not in (None, 1) or packing_invariant:
        raise NotImplementedError("segments and packing_invariant aren't served under cp_context")
    return _autograd.Call(
        seqs=seqs,
        scale=scale,
        l2norm=l2norm,
        use_gate=use_gate,
        lower_bound=lower_bound,
        output_final_state=output_final_state,
        route=route,
        differentiable=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state, a_log, dt_bias)),
        segments=cut,
        beta_scale=beta_scale,
    )


def kcp_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    *,
    cp_context: cp.KcpContext,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    variant: str | None = None,
    recompute_state: bool | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, None]:
    """`chunk_kda` under a `KcpContext`, and nothing else: for callers that mean it.

    Args:
        cp_context: of `build_kcp_context`; the inputs are this rank's tokens.
        initial_state, output_final_state: refused if given, as under any context.

        All others are those of `chunk_kda`.

    Returns:
        o, and None in the place of a final state.

    Raises:
        NotImplementedError: any other context, none included, besides what `chunk_kda` refuses.
        RuntimeError: another rank of the context's group is gone, late, or runs another call.

    Determinism: under det the same inputs give the same bits on the same ranks.
    """
    if not isinstance(cp_context, cp.KcpContext):
        raise NotImplementedError(
            f"cp_context must be a KcpContext of build_kcp_context, got {type(cp_context).__name__}"
        )
    o, _ = chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        disable_recompute=disable_recompute,
        cp_context=cp_context,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        variant=variant,
        recompute_state=recompute_state,
        backend=backend,
    )
    return o, None


def _variant(requested: str | None, context: cp.Call | None) -> str:
    variant = config.variant("kda", requested)
    return variant if context is None else context.variant("kda", variant)


def _tape(disable_recompute: bool, recompute_state: bool | None) -> Tape:
    check_tape(disable_recompute, recompute_state)
    if disable_recompute:
        return "all"
    return "inputs" if config.option("kda", "recompute_state", recompute_state) else "states"
