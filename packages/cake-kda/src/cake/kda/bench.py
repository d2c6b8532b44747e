"""What ``cake bench kda`` measures: shapes of real models, the arms, their inputs and the floor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cake.core.bench import Arm, Bench, Inputs, Pass, Shape, Work, fla_context
from cake.core.cp import KcpContext
from cake.core.sequences import CHUNK
from cake.kda import reference
from cake.kda._gates import log_decay, log_decay_backward
from cake.kda._stages import Gate
from cake.kda.spec import SPEC

__all__ = ["BENCH", "BOUND", "SHAPES", "bounded", "chunks", "inputs", "kernel_work", "work"]

HEAD_DIM = 128
#: The lower bound of Kimi's bounded gate.
BOUND = -5.0
_FREE = "-free"
_FOUR = (3840, 3776, 3200, 5568)
_M = (12000, 9000, 6000, 3768, 2000)

#: Heads of Kimi-Linear (32) and Kimi-K3 (96, 12 at tensor parallel 8), and the lengths that peers publish.
#: The gate of a shape is bounded, unless its name ends in "-free".
SHAPES = (
    Shape("tiny", (1, 2), (70, 30), tiny=True),
    Shape("tiny-free", (1, 2), (70, 30), tiny=True),
    Shape("h64-1x16384", (64, 64), (16384,)),
    Shape("h64-1x16384-free", (64, 64), (16384,)),
    Shape("h64-4docs", (64, 64), _FOUR),
    Shape("h64-4docs-free", (64, 64), _FOUR),
    Shape("h64-8x4096", (64, 64), (4096,) * 8),
    Shape("h32-M", (32, 32), _M),
    Shape("h32-M-free", (32, 32), _M),
    Shape("h32-1x32768", (32, 32), (32768,)),
    Shape("h16-1x8192", (16, 16), (8192,)),
    Shape("h96-1x8192", (96, 96), (8192,)),
    Shape("h12-1x32768", (12, 12), (32768,)),
    Shape("h4-4x16384", (4, 4), (16384,) * 4),
    Shape("h32-4docs", (32, 32), (49152, 32768, 28672, 20480), spread=True),
)


def bounded(shape: Shape) -> bool:
    """Whether the shape's gate has the lower bound."""
    return not shape.name.endswith(_FREE)


def inputs(shape: Shape, device: torch.device, seed: int) -> Inputs:
    """Tensors as a Kimi layer makes them: everything that can be activated in the kernel comes raw.

    q, k, v and the raw gate bf16 normal; beta's logits bf16 normal; A_log the log of a uniform in (1, 16) per
    head and dt_bias normal, fp32; boundaries int64 on the device; the gradient of the output bf16 normal.
    """
    heads, v_heads = shape.heads
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    bf16 = torch.bfloat16
    tensors = {
        "q": normal(1, shape.tokens, heads, HEAD_DIM, dtype=bf16),
        "k": normal(1, shape.tokens, heads, HEAD_DIM, dtype=bf16),
        "v": normal(1, shape.tokens, v_heads, HEAD_DIM, dtype=bf16),
        "g": normal(1, shape.tokens, v_heads, HEAD_DIM, dtype=bf16),
        "beta": normal(1, shape.tokens, v_heads, dtype=bf16),
        "A_log": (1 + 15 * torch.rand(v_heads, generator=generator, device=device)).log(),
        "dt_bias": normal(v_heads * HEAD_DIM),
    }
    for x in tensors.values():
        x.requires_grad_()
    tensors["cu_seqlens"] = torch.tensor(shape.boundaries, dtype=torch.int64, device=device)
    gradient = normal(1, shape.tokens, v_heads, HEAD_DIM, dtype=bf16)
    return Inputs(shape=shape, tensors=tensors, output_gradients=(gradient,))


def _call(function: Callable[..., Any], given: Inputs, **more: Any) -> Sequence[torch.Tensor | None]:
    """One call as training frameworks make it; the function has the signature that all the arms share."""
    safe = bounded(given.shape)
    o, _ = function(
        **given.tensors,
        **more,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=safe,
        lower_bound=BOUND if safe else None,
    )
    return (o,)


def _cake() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from cake.kda import chunk_kda

    return partial(_call, chunk_kda)


def _fla() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from fla.ops.kda import chunk_kda

    return partial(_call, chunk_kda)


def _cake_under(context: KcpContext, layout: str) -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from cake.kda import kcp_chunk_kda

    return partial(_call, kcp_chunk_kda, cp_context=context)


def _fla_under(context: KcpContext, layout: str) -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from fla.ops.kda import chunk_kda

    return partial(_call, chunk_kda, cp_context=fla_context(context, layout))


def _flashkda() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    import flash_kda

    def call(given: Inputs) -> Sequence[torch.Tensor | None]:
        if not bounded(given.shape):
            raise NotImplementedError("FlashKDA serves bounded gates alone")
        x = given.tensors
        o = torch.empty_like(x["v"])
        flash_kda.fwd(
            *(x[name] for name in ("q", "k", "v", "g", "beta")),
            HEAD_DIM**-0.5,
            o,
            A_log=x["A_log"],
            dt_bias=x["dt_bias"].view(-1, HEAD_DIM),
            lower_bound=BOUND,
            initial_state=None,
            final_state=None,
            cu_seqlens=x["cu_seqlens"],
        )
        return (o,)

    return call


def _configuration(variant: str, mode: str | None) -> Mapping[str, Any]:
    return {
        "linear_attention_backend": "cake",
        "cake_kda_variant": variant,
        "cake_kda_recompute_state": mode == "recompute",
    }


def _truth(given: Inputs) -> dict[str, torch.Tensor]:
    x = {name: tensor.detach() for name, tensor in given.tensors.items()}
    gate = Gate(x["A_log"], x["dt_bias"].view(-1, HEAD_DIM), BOUND if bounded(given.shape) else None)
    raw = x["g"].transpose(1, 2)
    g = log_decay(raw, gate).transpose(1, 2)
    beta = x["beta"].double().sigmoid()
    do, boundaries = given.output_gradients[0], given.shape.boundaries
    o, _ = reference.forward(x["q"], x["k"], x["v"], g, beta, boundaries=boundaries)
    grads = reference.backward(x["q"], x["k"], x["v"], g, beta, do, boundaries=boundaries)
    d_raw, d_a_log = log_decay_backward(raw, grads.dg.transpose(1, 2).float(), gate)
    return {
        "output0": o,
        "dq": grads.dq,
        "dk": grads.dk,
        "dv": grads.dv,
        "dg": d_raw.transpose(1, 2),
        "dbeta": grads.dbeta * beta * (1 - beta),
        "dA_log": d_a_log.double().sum((0, 2, 3)),
        "ddt_bias": d_raw.double().sum((0, 2)).flatten(),
    }


def chunks(shape: Shape) -> int:
    """Chunks of all sequences; each restarts them."""
    return sum(-(-length // CHUNK) for length in shape.lengths)


def work(shape: Shape, which: Pass, mode: str | None) -> Work:
    """The least work of a pass: each tensor moved once, and the products of the chunked algorithm.

    Per chunk and v head, with b a product [64, 128] x [128, 128] and m a product [64, 64] x [64, 128]:

    - forward 3 b + 2 m, the two decayed products of tokens (10 of 16 sub-blocks of 2 m) and the inverse of a
      64 x 64 triangle; it moves q, k, v, o, the raw gate (bf16) and beta. The tape of mode "save" adds the
      states (bf16 [128, 128]).
    - backward 7 b + 5 m, of which b + m rebuild the deltas from the states, and four decayed products; it
      prepares the chunks again. It moves q, k, v, do, the raw gate and beta, the tape, and the gradients.
      Mode "recompute" has no tape: it walks the states (2 b + m) once more.

    Args:
        shape: Heads and lengths.
        which: "fwd", "fwd_train" or "bwd".
        mode: "save" or "recompute"; None counts as "save".
    """
    heads, v_heads = shape.heads
    tape = which != "fwd" and mode != "recompute"
    b, m = 2 * CHUNK * HEAD_DIM * HEAD_DIM, 2 * CHUNK * CHUNK * HEAD_DIM
    pairs = 10 / 16 * m
    prepare = 2 * pairs + 0.36e6
    qk = 2 * 2 * shape.tokens * heads * HEAD_DIM
    v = 2 * shape.tokens * v_heads * HEAD_DIM
    beta = 2 * shape.tokens * v_heads
    # Before a sequence's first chunk the state is zero and needs no room.
    states = chunks(shape) - sum(length > 0 for length in shape.lengths)
    tape_bytes = 2 * v_heads * states * HEAD_DIM * HEAD_DIM if tape else 0
    if which == "bwd":
        per_head = prepare + 7 * b + 5 * m + 4 * pairs + (0 if tape else 2 * b + m)
        nbytes = 2 * qk + 5 * v + 2 * beta + tape_bytes
    else:
        per_head = prepare + 3 * b + 2 * m
        nbytes = qk + 3 * v + beta + tape_bytes
    return Work(flops=chunks(shape) * v_heads * per_head, nbytes=nbytes)


# A walk, and whether it writes an output and states: the adjoint always does.
_WALK = re.compile(r"(?:scan_kernel<\d+, (?P<output>\w+), (?P<states>\w+)|adj_kernel)")


def kernel_work(shape: Shape, name: str) -> Work | None:
    """The least work of one launch of a kernel: each of its tensors moved once, and its products.

    Products as in `work`: prep makes both decayed products of tokens and the inverse, the walks 3 b + 2 m
    (2 b + m without the output), out 4 b + 3 m and four decayed products. What a pre-scan of segments does
    depends on the decay, so it has none.
    """
    heads, v_heads = shape.heads
    b, m = 2 * CHUNK * HEAD_DIM * HEAD_DIM, 2 * CHUNK * CHUNK * HEAD_DIM
    pairs = 10 / 16 * m
    qk, v = 2 * 2 * shape.tokens * heads * HEAD_DIM, 2 * shape.tokens * v_heads * HEAD_DIM
    beta = 2 * shape.tokens * v_heads
    # What prep makes: three decayed rows, P and T bf16, and the chunk's decay; a state for each chunk but a
    # sequence's first.
    squares = 2 * shape.tokens * v_heads * CHUNK
    prepared = 3 * v + 2 * squares + 4 * chunks(shape) * v_heads * HEAD_DIM
    tape = 2 * v_heads * (chunks(shape) - sum(x > 0 for x in shape.lengths)) * HEAD_DIM * HEAD_DIM
    if "prep_kernel" in name:
        products, nbytes = 2 * pairs + 0.36e6, qk + v + beta + prepared
    elif walk := _WALK.search(name):
        output, states = (x != "false" for x in walk.groups())
        products = 3 * b + 2 * m if output else 2 * b + m
        # Without an output neither Q nor P is read.
        nbytes = prepared + v + beta + (v if output else -v - squares) + (tape if states else 0)
    elif "out_kernel" in name:
        # q, k, v, the raw gate, do, y, T and both tapes; dq, dk, dv, the gate's gradient and dbeta.
        products, nbytes = 4 * b + 3 * m + 4 * pairs, 2 * qk + 6 * v + squares + 3 * beta + 2 * tape
    else:
        return None
    return Work(flops=chunks(shape) * v_heads * products, nbytes=nbytes)


BENCH = Bench(
    op=SPEC.name,
    shapes=SHAPES,
    arms=(
        *(
            Arm(
                name=f"cake-{variant}",
                load=_cake,
                modes=("save", "recompute"),
                configuration=partial(_configuration, variant),
                under=_cake_under,
            )
            for variant in SPEC.variants
        ),
        Arm(name="fla", load=_fla, peer=True, under=_fla_under),
        Arm(name="flashkda", load=_flashkda, peer=True, forward_only=True),
    ),
    inputs=inputs,
    work=work,
    kernel_work=kernel_work,
    reference=_truth,
    reference_tokens=8192,
    distributions=("flash-linear-attention", "fla-core", "flash-kda"),
)
