"""The stages on sm_90a: what each kernel is given, and where its results live. The interface: `_stages`.

Nothing is read back from the device and every launch goes to the current stream, so all of it can be captured
into a CUDA graph. Memory and launches go through `cake.core.recording`, so that a call plays what an earlier
one with the same metadata recorded: a stage asks a tensor for its shape, dtype and device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from cake.core import loader, state_chain
from cake.core.recording import empty, launch, scratch
from cake.core.segments import Segments
from cake.core.tables import plan_tables
from cake.gdn._stages import Prep
from cake.gdn.plan import CHUNK, HEAD_DIM, Sequences

ARCH = "sm_90a"


def prep(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences, *, l2norm: bool) -> Prep:
    """The call's tables, then norms, decays and chunk inverses; see `_stages`."""
    heads, v_heads, total, device = k.shape[2], g.shape[2], seqs.total, k.device
    made = Prep(
        t=empty((v_heads, total, CHUNK), torch.bfloat16, device),
        b=empty((v_heads, total), torch.float32, device),
        rk=empty((heads, total), torch.float32, device),
        plan=tables(seqs, device),
    )
    launch(
        _library("gdn_prep"), "gdn_prep", device,
        k, g, beta, made.plan, seqs.n, seqs.chunk_capacity, made.t, made.b, made.rk, l2norm,
    )  # fmt: skip
    return made


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    scale: float,
    l2norm: bool,
    initial_state: torch.Tensor | None = None,
    entering: torch.Tensor | None = None,
    output_final_state: bool = False,
    save_states: bool = False,
    need_output: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The serial forward; see `_stages`. The tape holds tile images: see `logical_states`."""
    edge = initial_state is not None or entering is not None
    o = empty(v.shape, v.dtype, v.device) if need_output else None
    final_state = _states(_sequences(seqs), v) if output_final_state else None
    states = _tape(seqs, v, edge) if save_states else None
    launch(
        _library("gdn_scan"), "gdn_scan", v.device,
        q, k, v, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.t, prep.b, prep.rk, initial_state, entering, o, final_state, states, edge, scale, l2norm,
    )  # fmt: skip
    return o, final_state, states


def adj(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    scale: float,
    l2norm: bool,
    dht: torch.Tensor | None = None,
    leaving: torch.Tensor | None = None,
    need_dh0: bool = False,
    y: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The serial adjoint; see `_stages`."""
    edge = dht is not None or leaving is not None
    y = empty(do.shape, do.dtype, do.device) if y is None else y
    adj_states = scratch(
        "gdn", "adj_states", (seqs.slots(edge), do.shape[2], HEAD_DIM, HEAD_DIM), torch.bfloat16, do.device
    )
    rq = scratch("gdn", "rq", (q.shape[2], seqs.total), torch.float32, do.device)
    dh0 = _states(_sequences(seqs), do) if need_dh0 else None
    launch(
        _library("gdn_adj"), "gdn_adj", do.device,
        q, k, do, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.t, prep.b, prep.rk, dht, leaving, y, dh0, adj_states, rq, edge, scale, l2norm,
    )  # fmt: skip
    return y, adj_states, dh0, rq


def transfer(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Segments,
    *,
    initial_state: torch.Tensor | None = None,
    least: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The maps of segments; see `_stages`."""
    b, m = (_states(seqs.n, v) for _ in range(2))
    live = empty((seqs.n, v.shape[2]), torch.int32, v.device)
    launch(
        _library("gdn_transfer"), "gdn_transfer", v.device,
        k, v, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.t, prep.b, prep.rk, initial_state, b, m, live, least,
    )  # fmt: skip
    return b, m, live


def adj_transfer(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Segments,
    live: torch.Tensor,
    *,
    scale: float,
    l2norm: bool,
    dht: torch.Tensor | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """The adjoint maps' B; see `_stages`."""
    b = _states(seqs.n, do)
    launch(
        _library("gdn_transfer"), "gdn_adj_transfer", do.device,
        q, k, do, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.t, prep.b, prep.rk, dht, b, live, least, scale, l2norm,
    )  # fmt: skip
    return b


def merge(
    b: torch.Tensor,
    m: torch.Tensor,
    chains: Sequence[Sequence[state_chain.Step]],
    n_out: int,
    **options: Any,
) -> torch.Tensor:
    """See `cake.core.state_chain.merge`, whose arguments, result and errors these are."""
    return state_chain.launch_merge(_merges(), ARCH, b, m, chains, n_out, **options)


def chain(
    b: torch.Tensor,
    m: torch.Tensor,
    live: torch.Tensor,
    prep: Prep,
    seqs: Segments,
    *,
    adjoint: bool = False,
) -> torch.Tensor:
    """The states where segments meet; see `_stages`."""
    return state_chain.launch_chain(_merges(), ARCH, b, m, live, prep.plan, seqs, adjoint=adjoint)


def out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    y: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    states: torch.Tensor,
    adj_states: torch.Tensor,
    rq: torch.Tensor,
    seqs: Sequences,
    *,
    scale: float,
    l2norm: bool,
    states_edge: bool,
    adj_edge: bool,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parallel rest of the backward; see `_stages`. dv takes over y's storage."""
    device = q.device
    if into is None:
        dq, dk = empty(q.shape, q.dtype, device), empty(k.shape, k.dtype, device)
        dbeta, dg = (empty(v.shape[:3], torch.float32, device) for _ in range(2))
    else:
        dq, dk, y, dbeta, dg = into
    launch(
        _library("gdn_out"), "gdn_out", device,
        q, k, v, do, y, beta, prep.plan, seqs.n, seqs.chunk_capacity,
        prep.t, prep.b, rq, prep.rk, states, adj_states, states_edge, adj_edge,
        dq, dk, dbeta, dg, scale, l2norm, _ctas(device.index),
    )  # fmt: skip
    return dq, dk, y, dbeta, dg


def sigmoid(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """Betas of logits [B, T, HV], as `_gates.beta_forward`."""
    beta: torch.Tensor = empty(logits.shape, torch.float32, logits.device)
    launch(_library("gdn_prep"), "gdn_sigmoid", logits.device, logits, scale, beta)
    return beta


def sigmoid_backward(d_beta: torch.Tensor, logits: torch.Tensor, scale: float, to: torch.Tensor) -> None:
    """Writes the gradient of logits, as `_gates.beta_backward`, in the dtype and to the strides of `to`."""
    device = logits.device
    launch(_library("gdn_prep"), "gdn_sigmoid_backward", device, d_beta, logits, scale, to)


def tables(seqs: Sequences, device: torch.device) -> torch.Tensor:
    """What the kernels read of sequences and chunks, int32."""
    return plan_tables(seqs, device, _plans)


def library() -> Any:
    """What plays the recordings of a call."""
    return _library("gdn_prep")


def logical_states(images: torch.Tensor) -> torch.Tensor:
    """The states of a tape [slots, HV, 128, 128] as the twins hold them, rows of V and columns of K.

    A kernel's image is two panels of 64 columns; the 16-byte group g of row v sits at group g ^ (v % 8).
    """
    rows = torch.arange(HEAD_DIM, device=images.device)[:, None]
    groups = torch.arange(8, device=images.device)[None, :] ^ (rows & 7)
    panels = images.reshape(*images.shape[:2], 2, HEAD_DIM, 8, 8)
    logical: torch.Tensor = panels[:, :, :, rows, groups].permute(0, 1, 3, 2, 4, 5).reshape(images.shape)
    return logical


def _library(name: str) -> Any:
    return loader.load("gdn", name, arch=ARCH)


def _plans() -> tuple[Any, ...]:
    library = _library("gdn_prep")
    return library.gdn_plan, library.gdn_boundaries, library.gdn_cut_plan, library.gdn_chosen_plan


def _merges() -> Any:
    return loader.load("gdn", "affine_merge", arch=ARCH, package="state_chain")


@lru_cache(maxsize=64)
def _ctas(device: int) -> int:
    # Persistent CTAs of gdn_out. Any count gives the same bits.
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tape(seqs: Sequences, v: torch.Tensor, edge: bool) -> torch.Tensor:
    states: torch.Tensor = empty((seqs.slots(edge), v.shape[2], HEAD_DIM, HEAD_DIM), torch.bfloat16, v.device)
    return states


def _states(n: int, v: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = empty((n, v.shape[2], HEAD_DIM, HEAD_DIM), torch.float32, v.device)
    return states


def _sequences(seqs: Sequences) -> int:
    return seqs.whole.n if isinstance(seqs, Segments) else seqs.n
