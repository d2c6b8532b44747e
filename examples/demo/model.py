"""A small hybrid language model: linear attention, and softmax attention in every fourth layer.

The linear layers are those of Qwen3-Next (GDN) or of Kimi-Linear (KDA), or take turns: one fused projection
for q, k and v, a short causal convolution, `cake.gdn.chunk_gated_delta_rule` or `cake.kda.chunk_kda` with the
L2 norm, the gate and beta's sigmoid in the kernel, a gated norm, a projection. All documents of a pack are
computed in one call; neither the convolution, the state nor attention crosses a boundary.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cake.gdn import chunk_gated_delta_rule
from cake.kda import chunk_kda

HEAD = 128  # the op's head dimension, for q, k and v
REACH = 4  # taps of the short convolution


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int  # of q and k
    value_heads: int  # of v, and so of the state, the gate and beta
    attention_heads: int


class Cache(dict[int, tuple[Tensor, ...]]):
    """What each layer, by its number, keeps between calls on one document; and the tokens so far."""

    length = 0


class LinearAttention(nn.Module):
    """What the two kinds share; `mix` is the op with its gate."""

    def __init__(self, size: Size, number: int) -> None:
        super().__init__()
        self.number, self.heads, self.value_heads = number, size.heads, size.value_heads
        channels = (2 * size.heads + size.value_heads) * HEAD
        self.qkv = nn.Linear(size.width, channels, bias=False)
        self.beta = nn.Linear(size.width, size.value_heads, bias=False)
        self.output_gate = nn.Linear(size.width, size.value_heads * HEAD, bias=False)
        self.taps = nn.Parameter(torch.empty(REACH, channels).uniform_(-0.5, 0.5))
        self.log_rate = nn.Parameter(torch.empty(size.value_heads).uniform_(1, 16).log())
        self.norm = nn.Parameter(torch.ones(HEAD))
        self.out = nn.Linear(size.value_heads * HEAD, size.width, bias=False)

    def convolve(self, x: Tensor, position: Tensor, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        """Causal convolution over time of `[T, C]`, anew in every document; also the rows to keep."""
        if earlier is None:
            earlier = x.new_zeros(REACH - 1, x.shape[1])
        rows = torch.cat([earlier, x])
        y = self.taps[0] * x
        for back in range(1, REACH):
            inside = (position >= back).to(x.dtype)[:, None]
            y = y + self.taps[back] * inside * rows[REACH - 1 - back : rows.shape[0] - back]
        return F.silu(y), rows[-(REACH - 1) :]

    def forward(self, x: Tensor, position: Tensor, bounds: Tensor, cache: Cache | None) -> Tensor:
        tail, state = cache.get(self.number, (None, None)) if cache is not None else (None, None)
        mixed, tail = self.convolve(self.qkv(x), position, tail)
        # q, k and v stay views of the fused projection: the op takes the strides that come.
        mixed = mixed.to(torch.bfloat16).view(1, x.shape[0], -1, HEAD)
        q, k, v = mixed.split([self.heads, self.heads, self.value_heads], dim=2)
        o, state = self.mix(
            x,
            q=q,
            k=k,
            v=v,
            beta=self.beta(x).float()[None],
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.log_rate,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens_cpu=bounds,
        )
        if cache is not None:
            cache[self.number] = (tail, state)
        o = F.rms_norm(o[0].float(), (HEAD,), self.norm).flatten(1)
        return self.out(o * F.silu(self.output_gate(x)))

    def mix(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError


def rate_bias(*shape: int) -> nn.Parameter:
    """Such that softplus of it is between 1e-3 and 1e-1."""
    step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))


class GatedDeltaNet(LinearAttention):
    """One decay per head."""

    def __init__(self, size: Size, number: int) -> None:
        super().__init__(size, number)
        self.gate = nn.Linear(size.width, size.value_heads, bias=False)
        self.rate_bias = rate_bias(size.value_heads)

    def mix(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        gate = self.gate(x).float()[None]
        return chunk_gated_delta_rule(g=gate, dt_bias=self.rate_bias, **arguments)


class KimiDeltaAttention(LinearAttention):
    """One decay per head and key channel."""

    def __init__(self, size: Size, number: int) -> None:
        super().__init__(size, number)
        channels = size.value_heads * HEAD
        self.gate = nn.Sequential(
            nn.Linear(size.width, HEAD, bias=False), nn.Linear(HEAD, channels, bias=False)
        )
        self.rate_bias = rate_bias(channels)

    def mix(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        gate = self.gate(x).to(torch.bfloat16).view(1, x.shape[0], self.value_heads, HEAD)
        return chunk_kda(g=gate, dt_bias=self.rate_bias, **arguments)


class Attention(nn.Module):
    """Causal softmax attention inside each document. It needs no positions: the other layers give order."""

    def __init__(self, size: Size, number: int) -> None:
        super().__init__()
        self.number, self.heads = number, size.attention_heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, position: Tensor, bounds: Tensor, cache: Cache | None) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.heads, -1).permute(1, 2, 0, 3).unbind(0)
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if cache is not None:
            if self.number in cache:
                earlier_k, earlier_v = cache[self.number]
                k, v = torch.cat([earlier_k, k], dim=1), torch.cat([earlier_v, v], dim=1)
            cache[self.number] = (k, v)
        causal = k.shape[1] == q.shape[1]
        if causal:
            documents = [slice(start, end) for start, end in itertools.pairwise(bounds.tolist())]
        elif q.shape[1] == 1:
            documents = [slice(None)]
        else:
            raise NotImplementedError(f"expected one token to continue a document, got {q.shape[1]}")
        parts = [
            F.scaled_dot_product_attention(q[None, :, d], k[None, :, d], v[None, :, d], is_causal=causal)[0]
            for d in documents
        ]
        o = torch.cat(parts, dim=1)
        return self.out(o.transpose(0, 1).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 64 * round(width * 8 / 3 / 64)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


#: The linear layers of a model, which take turns.
OPS: dict[str, tuple[type[LinearAttention], ...]] = {
    "gdn": (GatedDeltaNet,),
    "kda": (KimiDeltaAttention,),
    "hybrid": (GatedDeltaNet, KimiDeltaAttention),
}


class Layer(nn.Module):
    def __init__(self, size: Size, number: int, linear: type[LinearAttention]) -> None:
        super().__init__()
        self.mixer = (Attention if number % 4 == 3 else linear)(size, number)
        self.feed_forward = FeedForward(size.width)
        self.norms = nn.Parameter(torch.ones(2, size.width))

    def forward(self, x: Tensor, position: Tensor, bounds: Tensor, cache: Cache | None) -> Tensor:
        width = x.shape[-1:]
        x = x + self.mixer(F.rms_norm(x, width, self.norms[0]), position, bounds, cache)
        return x + self.feed_forward(F.rms_norm(x, width, self.norms[1]))


class Model(nn.Module):
    """Next-byte logits `[T, vocabulary]` for a pack of documents, or for the one that `cache` is about."""

    def __init__(self, size: Size, vocabulary: int, op: str = "gdn") -> None:
        super().__init__()
        kinds = OPS[op]
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(
            Layer(size, number, kinds[number % len(kinds)]) for number in range(size.layers)
        )
        self.norm = nn.Parameter(torch.ones(size.width))
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and name.endswith("weight"):
                nn.init.normal_(weight, std=0.02 if "embedding" in name else weight.shape[1] ** -0.5)
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(
                    weight
                )  # every layer starts as the identity, and every byte as likely as another

    def forward(self, tokens: Tensor, position: Tensor, bounds: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position, bounds, cache)
        if cache is not None:
            cache.length += tokens.shape[0]
        return self.head(F.rms_norm(x, x.shape[-1:], self.norm)).float()


@torch.no_grad()
def continue_text(
    model: Model, start: bytes, length: int, *, border: int, temperature: float, seed: int
) -> bytes:
    """`start` and up to `length` bytes after it, each from the state so far; fewer if the document ends."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = Cache()
    text, new = bytearray(start), [border, *start]
    for _ in range(length):
        tokens = torch.tensor(new, device=device)
        position = torch.arange(cache.length, cache.length + len(new), device=device)
        logits = model(tokens, position, torch.tensor([0, len(new)]), cache)[-1].cpu()
        new = [int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))]
        if new[0] == border:
            break
        text += bytes(new)
    return bytes(text)
