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
from cake.gdn import _autograd, _gates, _kcp, _run, _segments, _stages
from cake.gdn._checks import (
    check_alignment,
    check_gate,
    check_inputs,
    check_state,
)
from cake.gdn._route import Route, last_route
from cake.gdn.plan import CHUNK, HEAD_DIM

__all__ = ["Route", "chunk_gated_delta_rule", "kcp_chunk_gated_delta_rule", "last_route"]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | Sequence[int] | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    head_first: bool = False,
    transpose_state_layout: bool | None = None,
    variant: str | None = None,
    recompute_state: bool | None = None,
    segments: int | None = None,
    packing_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over sequences of tokens, differentiable.

    With decay a = exp(g), state S [K, V] and q, k after the L2 norm, each token of a v head does

        S <- a S + k (beta (v - a S^T k))^T        o = scale S^T q

    Args:
        q: bf16 `[B, T, H, 128]`. q, k and v may be strided views, say of one fused projection: their last
            dimension must be contiguous, and on a GPU every address and stride a multiple of 16 bytes.
        k: bf16 `[B, T, H, 128]`.
        v: bf16 `[B, T, HV, 128]`, HV a multiple of H: v head h reads q/k head h // (HV / H).
        g: log decay, natural log, at most 0: `[B, T, HV]`, fp32 or bf16, any strides. A value below -88
            counts as -88. With `use_gate_in_kernel` the raw gate instead.
        beta: `[B, T, HV]`, fp32 or bf16, any strides. With `use_beta_sigmoid_in_kernel` its logits instead.
        scale: default 128^-0.5.
        initial_state: fp32 `[N, HV, K, V]`, one for each sequence; zero by default. Copied unless contiguous.
        output_final_state: also return the state after each sequence.
        use_qk_l2norm_in_kernel: use q / sqrt(sum q^2 + 1e-6) and k alike.
        use_beta_sigmoid_in_kernel: use sigmoid(beta).
        allow_neg_eigval: use 2 sigmoid(beta); needs `use_beta_sigmoid_in_kernel`.
        state_v_first: initial and final states are `[N, HV, V, K]`; a transposing copy each way.
        cu_seqlens: boundaries of packed sequences (B = 1): N + 1 values from 0 to T, int32 or int64, empty
            sequences allowed. On the GPU they are never read back, so that their values cannot be checked:
            boundaries that decrease or don't span 0 to T give undefined results there. A CPU tensor is
            checked and used as `cu_seqlens_cpu`.
        cu_seqlens_cpu: the same as a CPU tensor or a list of ints: checked, and no synchronisation. Used
            in place of `cu_seqlens` when both are given.
        chunk_indices: not served.
        cp_context: a `KcpContext` (see `build_kcp_context`) or flash-linear-attention's `FLACPContext`: the
            inputs are this rank's tokens of a pack that lies on several ranks. Its boundaries replace
            `cu_seqlens` and `cu_seqlens_cpu`; every rank of its group makes the same call, and the same
            backward.
        use_gate_in_kernel: use -exp(A_log) softplus(g + dt_bias) as the log decay.
        A_log: `[HV]`, fp32 or bf16; needed by `use_gate_in_kernel`.
        dt_bias: `[HV]`, fp32 or bf16; zero by default.
        chunk_size: 64 alone.
        head_first: False alone.
        transpose_state_layout: the older name of `state_v_first`.
        variant: "det" or "fast" for this call in place of the configured one.
        recompute_state: for this call in place of the configured `--cake-gdn-recompute-state`.
        segments: into how many segments of whole chunks each sequence is cut, to be walked at once: 1 for
            none, at most its chunks, and more where one would be longer than 128 chunks. By default
            `cake.core.segments.plan` decides, from the lengths and HV alone; where the boundaries of several
            sequences are on the GPU alone, T, N and HV leave a few plans, of which the GPU takes one by them:
            it may give other bits than `plan` would. Beta from 0 to 2 is taken for granted where a call with
            `use_qk_l2norm_in_kernel` is cut.
        packing_invariant: plan each sequence as if it were alone in the call. Of several sequences the host
            must know the boundaries.

    Returns:
        o, bf16 `[B, T, HV, 128]`, and the final state, fp32 and laid out like `initial_state`, or None.
        Without tokens o is empty and the state passes through.

    Raises:
        TypeError: not a tensor or a number, a wrong dtype, an unknown argument.
        ValueError: a wrong shape, device, stride or alignment, boundaries that don't fit, arguments that
            contradict each other; also an initial or final state under a context.
        NotImplementedError: `segments` under `cp_context`, `chunk_indices`, `head_first`, another
            chunk size, a device without kernels. Every check comes before any launch.

    Gradients: for q, k, v, g, beta, A_log, dt_bias and initial_state, in their dtypes, where asked for. A
    loss on either result alone works; an unused final state leaves every bit as it is. A gradient of o whose
    last dimension isn't contiguous (as `o.sum().backward()` makes one) is copied once. A call keeps its
    inputs for the backward, `cu_seqlens` included: changing them in place before it raises there.
    Gradients of views that `cake.core.split_projection` made of one tensor are parts of one tensor, too.
    Gradients of gradients raise, as do tangents of forward-mode differentiation on a GPU or under a context.

    Determinism: under det the same inputs give the same bits in every call, process and stream, whether
    states are saved or recomputed. A sequence's bits don't depend on its neighbours in the pack as long as it
    is cut alike; with `packing_invariant` it always is, which can take up to about one and a half times as
    long in packs that fill the GPU anyway. Another number of segments gives other bits within the same
    errors.
    """
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    near = None
    if cp_context is None and not tracing.traced():
        # A call that differs in nothing from one that passed every check, but for what its recording sees.
        given = (
            scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
            state_v_first, chunk_indices, use_gate_in_kernel, chunk_size, head_first, transpose_state_layout,
            variant, recompute_state, segments, packing_invariant,
        )  # fmt: skip
        near = near_key_of(tensors, cu_seqlens, cu_seqlens_cpu, given)
        call = None if near is None else _calls.get(near)
        if call is not None:
            try:
                first = state_v_first or bool(transpose_state_layout)
                return _run.run(tensors[:6], call, cu_seqlens, first)
            except Otherwise:
                pass  # another one's, or one that is refused

    if cp_context is not None:
        cp.refuse_states(initial_state, output_final_state)
    if chunk_indices is not None:
        raise NotImplementedError("chunk_indices isn't served: leave it out, cu_seqlens says it all")
    if head_first:
        raise NotImplementedError("head_first isn't served: inputs are [B, T, H, 128], got head_first=True")
    if chunk_size != CHUNK:
        raise NotImplementedError(f"chunk_size must be {CHUNK}, got {chunk_size}")
    if transpose_state_layout is not None:
        if state_v_first:
            raise ValueError("state_v_first and its older name transpose_state_layout are given both")
        state_v_first = transpose_state_layout
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    scale = HEAD_DIM**-0.5 if scale is None else check_number("scale", scale)

    if tracing.traced() and cp_context is None:
        from cake.gdn import _ops

        check_gate(use_gate_in_kernel, A_log, dt_bias, v.shape[2], q.device)
        if state_v_first and initial_state is not None:
            initial_state = initial_state.transpose(-1, -2)
        o, final_state = _ops.call(
            q,
            k,
            v,
            g,
            beta,
            initial_state,
            cu_seqlens,
            cu_seqlens_cpu,
            A_log,
            dt_bias,
            scale=scale,
            l2norm=bool(use_qk_l2norm_in_kernel),
            output_final_state=bool(output_final_state),
            beta_scale=_gates.beta_scale(allow_neg_eigval) if use_beta_sigmoid_in_kernel else None,
            variant=variant,
            recompute_state=recompute_state,
            segments=segments,
            packing_invariant=bool(packing_invariant),
        )
        if state_v_first and final_state is not None:
            final_state = final_state.transpose(-1, -2).contiguous()
        return o, final_state

    settings: tuple[Any, ...] = (
        scale,
        bool(use_qk_l2norm_in_kernel),
        bool(output_final_state),
        state_v_first,
        use_gate_in_kernel,
        variant,
        recompute_state,
        segments,
        packing_invariant,
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
    elif (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        check_alignment(q, k, v)

    if near is not None and call.played and A_log is dt_bias is None and not use_gate_in_kernel:
        # Nothing lies between the arguments and the recording, which sees all of their metadata.
        _calls.keep(near, call)

    if use_gate_in_kernel:
        assert A_log is not None
        g = _gates.gate(g, A_log, dt_bias)
    if use_beta_sigmoid_in_kernel and not (context is None and call.played):
        beta = _gates.beta_sigmoid(beta, allow_neg_eigval)
    if context is not None:
        return _kcp.run(q, k, v, g, beta, call, context), None
    return _run.run((q, k, v, g, beta, initial_state), call, cu_seqlens, state_v_first)


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
    output_final_state: bool,
    state_v_first: bool,
    use_gate: bool,
    variant: str | None,
    recompute_state: bool | None,
    segments: int | None,
    packing_invariant: bool,
    beta_scale: float | None,
) -> _autograd.Call:
    """Every check of a call, and what it is besides its tensors."""
    check_inputs(q, k, v, g, beta)
    check_alignment(q, k, v)
    device, v_heads = q.device, v.shape[2]
    check_gate(use_gate, a_log, dt_bias, v_heads, device)
    if context is None:
        seqs = sequences.of_call(q.shape[0], q.shape[1], device, cu_seqlens, cu_seqlens_cpu)
    else:
        seqs = context.sequences(q.shape[0], q.shape[1])
    if initial_state is not None:
        check_state(initial_state, seqs.n, v_heads, device, ("V", "K") if state_v_first else ("K", "V"))
    route = Route(
        path="single" if context is None else context.path,
        variant=_variant(variant, context),
        backend=_stages.backend_name(device),
        recompute_state=bool(config.option("gdn", "recompute_state", recompute_state)),
    )
    if context is not None:
        _stages.check_context(route.backend)
        if segments not in (None, 1) or packing_invariant:
            raise NotImplementedError("segments and packing_invariant aren't served under cp_context")
    return _autograd.Call(
        seqs=seqs,
        scale=scale,
        l2norm=l2norm,
        output_final_state=output_final_state,
        route=route,
        differentiable=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state, a_log, dt_bias)),
        segments=_segments.cut_of_call(seqs, v_heads, segments, packing_invariant)
        if context is None
        else None,
        beta_scale=beta_scale,
    )


def kcp_chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    cp_context: cp.KcpContext,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    variant: str | None = None,
    recompute_state: bool | None = None,
) -> tuple[torch.Tensor, None]:
    """`chunk_gated_delta_rule` under a `KcpContext`, and nothing else: for callers that mean it.

    Args:
        cp_context: of `build_kcp_context`; the inputs are this rank's tokens.
        initial_state, output_final_state: refused if given, as under any context.

        All others are those of `chunk_gated_delta_rule`.

    Returns:
        o, and None in the place of a final state.

    Raises:
        NotImplementedError: any other context, none included, besides what `chunk_gated_delta_rule` refuses.
        RuntimeError: another rank of the context's group is gone, late, or runs another call.

    Determinism: under det the same inputs give the same bits on the same ranks.
    """
    if not isinstance(cp_context, cp.KcpContext):
        raise NotImplementedError(
            f"cp_context must be a KcpContext of build_kcp_context, got {type(cp_context).__name__}"
        )
    o, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        cp_context=cp_context,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        chunk_size=chunk_size,
        variant=variant,
        recompute_state=recompute_state,
    )
    return o, None


def _variant(requested: str | None, context: cp.Call | None) -> str:
    variant = config.variant("gdn", requested)
    return variant if context is None else context.variant("gdn", variant)
