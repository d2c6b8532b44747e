"""What ``cake bench gdn`` measures: shapes of real models, the arms, their inputs and the floor."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cake.core.bench import Arm, Bench, Inputs, Pass, Shape, Work, fla_context
from cake.core.cp import KcpContext
from cake.gdn import reference
from cake.gdn.plan import CHUNK, HEAD_DIM
from cake.gdn.spec import SPEC

__all__ = ["BENCH", "SHAPES", "chunks", "inputs", "kernel_work", "work"]

_RL = (3339, 2802, 1340, 263)
_M = (12000, 9000, 6000, 3768, 2000)
_G = (3598, 4930, 6262, 7593, 8925, 10256, 11588, 12920, 14251, 15583, 16914, 18252)
# Cuts of FlashQLA's own benchmark: torch.randperm(32767) with seed 42, its first three entries plus one.
_FOUR_RANDOM = (7212, 7072, 13725, 4759)

#: H and HV of Qwen3-Next and Qwen3.5 models, whole, split over ranks, and with q and k repeated to HV. The
#: last two are packs for several ranks.
SHAPES = (
    Shape("tiny", (1, 2), (70, 30), tiny=True),
    Shape("M", (16, 48), _M),
    Shape("G", (16, 48), _G),
    Shape("h2v8-1x32768", (2, 8), (32768,)),
    Shape("h4v12-rl", (4, 12), _RL),
    Shape("h16v32-rl", (16, 32), _RL),
    Shape("h16v32-1x8192", (16, 32), (8192,)),
    Shape("h16v32-1x32768", (16, 32), (32768,)),
    Shape("h16v32-4random", (16, 32), _FOUR_RANDOM),
    Shape("h16v32-4x8192", (16, 32), (8192,) * 4),
    Shape("h16v64-1x32768", (16, 64), (32768,)),
    Shape("h16v64-8x4096", (16, 64), (4096,) * 8),
    Shape("M-repeated", (48, 48), _M),
    Shape("h32v32-4x8192", (32, 32), (8192,) * 4),
    Shape("h64v64-8x4096", (64, 64), (4096,) * 8),
    Shape("h32v32-rl", (32, 32), _RL),
    Shape("h16v48-4docs", (16, 48), (98304, 65536, 57344, 40960), spread=True),
    Shape("h16v32-1x131072", (16, 32), (131072,), spread=True),
)


def inputs(shape: Shape, device: torch.device, seed: int) -> Inputs:
    """Tensors as a Qwen3-Next layer makes them at the start of its training.

    q, k, v bf16 normal; g = -A softplus(a + 1) with A uniform in (0, 16) per head and a normal, fp32; beta a
    sigmoid of a normal, fp32; boundaries int32 on the device; the gradient of the output bf16 normal.
    """
    heads, v_heads = shape.heads
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    decay = 16.0 * torch.rand(v_heads, generator=generator, device=device)
    gate = -decay * torch.nn.functional.softplus(normal(1, shape.tokens, v_heads) + 1.0)
    tensors = {
        "q": normal(1, shape.tokens, heads, HEAD_DIM, dtype=torch.bfloat16),
        "k": normal(1, shape.tokens, heads, HEAD_DIM, dtype=torch.bfloat16),
        "v": normal(1, shape.tokens, v_heads, HEAD_DIM, dtype=torch.bfloat16),
        "g": gate,
        "beta": normal(1, shape.tokens, v_heads).sigmoid(),
    }
    for x in tensors.values():
        x.requires_grad_()
    tensors["cu_seqlens"] = torch.tensor(shape.boundaries, dtype=torch.int32, device=device)
    gradient = normal(1, shape.tokens, v_heads, HEAD_DIM, dtype=torch.bfloat16)
    return Inputs(shape=shape, tensors=tensors, output_gradients=(gradient,))


def _call(function: Callable[..., Any], given: Inputs) -> Sequence[torch.Tensor | None]:
    """One call as training frameworks make it; the function has the signature that all the arms share."""
    names = ("q", "k", "v", "g", "beta", "cu_seqlens")
    o, _ = function(use_qk_l2norm_in_kernel=True, **{name: given.tensors[name] for name in names})
    return (o,)


def _cake() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from cake.gdn import chunk_gated_delta_rule

    return partial(_call, chunk_gated_delta_rule)


def _fla() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    return partial(_call, _fla_function())


def _fla_function() -> Callable[..., Any]:
    # Where FlashQLA is installed, FLA hands its calls over to it: then this arm would be that one. FLA looks
    # at the variable once, when it first chooses.
    os.environ["FLA_FLASH_QLA"] = "0"
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    function: Callable[..., Any] = chunk_gated_delta_rule
    return function


def _flashqla() -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from flash_qla import chunk_gated_delta_rule

    return partial(_call, chunk_gated_delta_rule)


def _under(function: Callable[..., Any], context: Any, given: Inputs) -> Sequence[torch.Tensor | None]:
    """One call of a rank, with the tokens that it holds."""
    names = ("q", "k", "v", "g", "beta")
    tensors = {name: given.tensors[name] for name in names}
    o, _ = function(use_qk_l2norm_in_kernel=True, cp_context=context, **tensors)
    return (o,)


def _cake_under(context: KcpContext, layout: str) -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from cake.gdn import kcp_chunk_gated_delta_rule

    return partial(_under, kcp_chunk_gated_delta_rule, context)


def _fla_under(context: KcpContext, layout: str) -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    return partial(_under, _fla_function(), fla_context(context, layout))


def _flashqla_under(context: KcpContext, layout: str) -> Callable[[Inputs], Sequence[torch.Tensor | None]]:
    from flash_qla import chunk_gated_delta_rule
    from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context

    if layout != "contiguous":
        raise NotImplementedError(f"FlashQLA has no layout {layout!r}")
    bounds = torch.tensor(context.partition.boundaries)

    def call(given: Inputs) -> Sequence[torch.Tensor | None]:
        # As its own call without a context chooses: it cuts each rank's part too, where that pays.
        theirs = build_cp_context(
            boundaries,
            enable_inter=True,
            enable_intra=True,
            group=torch.distributed.group.WORLD,
            num_v_heads=given.shape.heads[1],
            chunk_size=CHUNK,
            cu_seqlens_cpu=bounds,
            is_train=True,
        )
        return _under(chunk_gated_delta_rule, theirs, given)

    boundaries = bounds.to(context.device)
    return call


def _configuration(variant: str, mode: str | None) -> Mapping[str, Any]:
    return {
        "linear_attention_backend": "cake",
        "cake_gdn_variant": variant,
        "cake_gdn_recompute_state": mode == "recompute",
    }


def _truth(given: Inputs) -> dict[str, torch.Tensor]:
    q, k, v, g, beta = (given.tensors[name].detach() for name in ("q", "k", "v", "g", "beta"))
    do, boundaries = given.output_gradients[0], given.shape.boundaries
    o, _ = reference.forward(q, k, v, g, beta, boundaries=boundaries)
    grads = reference.backward(q, k, v, g, beta, do, boundaries=boundaries)
    named = {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv, "dg": grads.dg, "dbeta": grads.dbeta}
    return {"output0": o, **named}


def chunks(shape: Shape) -> int:
    """Chunks of all sequences; each restarts them."""
    return sum(-(-length // CHUNK) for length in shape.lengths)


def work(shape: Shape, which: Pass, mode: str | None) -> Work:
    """The least work of a pass: each tensor moved once, and the products of the chunked algorithm.

    Per chunk and v head, with b a product [64, 128] x [128, 128] and m a product [64, 64] x [64, 128], and G
    v heads sharing what needs q and k alone:

    - forward 3 b + 2 m + 2 m / G and the inverse of a 64 x 64 triangle; it moves q, k, v, o, g and beta. The
      tape of mode "save" adds the states (bf16 [128, 128]) and the inverses (bf16 [64, 64]).
    - backward 8 b + 7 m + m / G, of which b + m rebuild the deltas from the states; it moves q, k, v, do,
      g and beta, the tape, and the gradients. Mode "recompute" has no tape: it walks the states (2 b + m)
      and makes the inverses (m / G) once more.

    Args:
        shape: Heads and lengths.
        which: "fwd", "fwd_train" or "bwd".
        mode: "save" or "recompute"; None counts as "save".
    """
    heads, v_heads = shape.heads
    tape = which != "fwd" and mode != "recompute"
    b, m = 2 * CHUNK * HEAD_DIM * HEAD_DIM, 2 * CHUNK * CHUNK * HEAD_DIM
    inverse = 0.36e6
    qk = 2 * 2 * shape.tokens * heads * HEAD_DIM
    v = 2 * shape.tokens * v_heads * HEAD_DIM
    scalars = 2 * 4 * shape.tokens * v_heads
    # Before a sequence's first chunk the state is zero and needs no room.
    states = chunks(shape) - sum(length > 0 for length in shape.lengths)
    tape_bytes = 2 * v_heads * (states * HEAD_DIM * HEAD_DIM + shape.tokens * CHUNK) if tape else 0
    if which == "bwd":
        per_v_head = 8 * b + 7 * m + (0 if tape else 2 * b + m + inverse)
        per_head = m if tape else 2 * m
        nbytes = 2 * qk + 3 * v + 2 * scalars + tape_bytes
    else:
        per_v_head = 3 * b + 2 * m + inverse
        per_head = 2 * m
        nbytes = qk + 2 * v + scalars + tape_bytes
    flops = chunks(shape) * (v_heads * per_v_head + heads * per_head)
    return Work(flops=flops, nbytes=nbytes)


# A walk, and whether it writes an output and states: the adjoint always does.
_WALK = re.compile(r"(?:scan_kernel<(?P<output>\w+), (?P<states>\w+)|adj_kernel)")


def kernel_work(shape: Shape, name: str) -> Work | None:
    """The least work of one launch of a kernel: each of its tensors moved once, and its products.

    Products as in `work`: prep makes m / G and the inverse, the walks 3 b + 2 m + m / G (2 b + m without the
    output), out 5 b + 5 m. What a pre-scan of segments does depends on the decay, so it has none.
    """
    heads, v_heads = shape.heads
    b, m = 2 * CHUNK * HEAD_DIM * HEAD_DIM, 2 * CHUNK * CHUNK * HEAD_DIM
    qk, v = 2 * 2 * shape.tokens * heads * HEAD_DIM, 2 * shape.tokens * v_heads * HEAD_DIM
    # What prep makes (T bf16, b fp32, norms of k) and beta; a state for each chunk but a sequence's first.
    inverses = 2 * shape.tokens * v_heads * CHUNK
    norms = 4 * shape.tokens * heads
    prepared = inverses + 4 * shape.tokens * v_heads + norms
    beta = 4 * shape.tokens * v_heads
    tape = 2 * v_heads * (chunks(shape) - sum(x > 0 for x in shape.lengths)) * HEAD_DIM * HEAD_DIM
    walked = qk + v + prepared + beta
    if "prep_kernel" in name:
        per_v_head, per_head, nbytes = 0.36e6, m, qk // 2 + 2 * beta + prepared
    elif walk := _WALK.search(name):
        output, states = (x != "false" for x in walk.groups())
        per_v_head, per_head = (3 * b + 2 * m, m) if output else (2 * b + m, 0)
        nbytes = walked + (v if output else -qk // 2) + (tape if states else 0)
    elif "out_kernel" in name:
        # q, k, v, do, y (dv already), both tapes, what prep made and the norms of q; dq, dk, dbeta and dg.
        read = 2 * qk + 3 * v + prepared + norms + 3 * beta
        per_v_head, per_head, nbytes = 5 * b + 5 * m, 0, read + 2 * tape
    else:
        return None
    return Work(flops=chunks(shape) * (v_heads * per_v_head + heads * per_head), nbytes=nbytes)


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
        Arm(name="flashqla", load=_flashqla, peer=True, under=_flashqla_under),
        Arm(name="fla", load=_fla, peer=True, under=_fla_under),
    ),
    inputs=inputs,
    work=work,
    kernel_work=kernel_work,
    reference=_truth,
    reference_tokens=8192,
    distributions=("flash-linear-attention", "fla-core", "flash-qla", "tilelang"),
)
