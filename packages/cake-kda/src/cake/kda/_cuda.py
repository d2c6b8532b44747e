"""The stages on sm_90a: what each kernel is given, and where its results live. The interface: `_stages`.

Nothing is read back from the device and every launch goes to the current stream, so all of it can be captured
into a CUDA graph. Memory and launches go through `cake.core.recording`, so that a call plays what an earlier
one with the same metadata recorded: a stage asks a tensor for its shape, dtype and device alone. `Prep` and
the tapes hold images of swizzled tiles, one for each chunk and v head: `logical_states` and `logical_prep`
show them as the twins do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from cake.core import loader, state_chain
from cake.core.recording import empty, launch, scratch
from cake.core.segments import Segments
from cake.core.sequences import CHUNK, Sequences
from cake.core.tables import plan_tables
from cake.kda._stages import Gate, Prep

ARCH = "sm_90a"
HEAD_DIM = 128
# Kinds of gates, as the kernels number them.
NO_GATE, STANDARD, BOUNDED = range(3)


def prep(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    gate: Gate | None,
    beta: torch.Tensor,
    seqs: Sequences,
    *,
    scale: float,
    l2norm: bool,
) -> Prep:
    """The call's tables, then decayed rows, inner products and inverses of every chunk; see `_stages`."""
    heads, v_heads, total, device = q.shape[2], g.shape[2], seqs.total, q.device
    rows = (seqs.chunk_capacity, v_heads, CHUNK, HEAD_DIM)
    squares = (seqs.chunk_capacity, v_heads, CHUNK, CHUNK)
    made = Prep(
        qg=_take("qg", rows, device),
        kg=_take("kg", rows, device),
        kr=_take("kr", rows, device),
        p=_take("p", squares, device),
        t=_take("t", squares, device),
        last=empty((seqs.chunk_capacity, v_heads, HEAD_DIM), torch.float32, device),
        rq=empty((heads, total), torch.float32, device),
        rk=empty((heads, total), torch.float32, device),
        plan=tables(seqs, device),
    )
    launch(
        _library("kda_prep"), "kda_prep", device,
        q, k, g, *_gate(gate), beta, made.plan, seqs.n, seqs.chunk_capacity,
        made.qg, made.kg, made.kr, made.p, made.t, made.last, made.rq, made.rk, scale, l2norm,
    )  # fmt: skip
    return made


def scan(
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    initial_state: torch.Tensor | None = None,
    entering: torch.Tensor | None = None,
    output_final_state: bool = False,
    save_states: bool = False,
    need_output: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The serial forward; see `_stages`."""
    edge = initial_state is not None or entering is not None
    o = empty(v.shape, v.dtype, v.device) if need_output else None
    final_state = _states(_sequences(seqs), v) if output_final_state else None
    states = _tape("states", seqs, v, edge) if save_states else None
    launch(
        _library("kda_scan"), "kda_scan", v.device,
        v, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.qg, prep.kg, prep.kr, prep.p, prep.t, prep.last,
        initial_state, entering, o, final_state, states, edge,
    )  # fmt: skip
    return o, final_state, states


def adj(
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    dht: torch.Tensor | None = None,
    leaving: torch.Tensor | None = None,
    need_dh0: bool = False,
    y: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The serial adjoint; see `_stages`."""
    edge = dht is not None or leaving is not None
    y = empty(do.shape, do.dtype, do.device) if y is None else y
    adj_states = _tape("adj_states", seqs, do, edge)
    dh0 = _states(_sequences(seqs), do) if need_dh0 else None
    launch(
        _library("kda_adj"), "kda_adj", do.device,
        do, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.qg, prep.kg, prep.kr, prep.p, prep.t, prep.last,
        dht, leaving, y, dh0, adj_states, edge,
    )  # fmt: skip
    return y, adj_states, dh0


def transfer(
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
        _library("kda_transfer"), "kda_transfer", v.device,
        v, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.qg, prep.kg, prep.kr, prep.p, prep.t, prep.last,
        initial_state, b, m, live, least,
    )  # fmt: skip
    return b, m, live


def adj_transfer(
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Segments,
    live: torch.Tensor,
    *,
    dht: torch.Tensor | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """The adjoint maps' B; see `_stages`."""
    b = _states(seqs.n, do)
    launch(
        _library("kda_transfer"), "kda_adj_transfer", do.device,
        do, beta, prep.plan, seqs.n, _sequences(seqs), seqs.chunk_capacity,
        prep.qg, prep.kg, prep.kr, prep.p, prep.t, prep.last,
        dht, b, live, least,
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
    g: torch.Tensor,
    gate: Gate | None,
    do: torch.Tensor,
    y: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    states: torch.Tensor,
    adj_states: torch.Tensor,
    seqs: Sequences,
    *,
    scale: float,
    l2norm: bool,
    states_edge: bool,
    adj_edge: bool,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The parallel rest of the backward; see `_stages`. dv takes over y's storage."""
    device = q.device
    if into is None:
        dq, dk, dg = (empty(x.shape, x.dtype, device) for x in (q, k, g))
        dbeta = empty(v.shape[:3], torch.float32, device)
    else:
        dq, dk, y, dbeta, dg = into
    partials = None
    if gate is not None:
        shape = (seqs.chunk_capacity, v.shape[2], 1 + HEAD_DIM)
        partials = empty(shape, torch.float32, device)
    launch(
        _library("kda_out"), "kda_out", device,
        q, k, v, g, *_gate(gate), do, y, beta, prep.plan, seqs.n, seqs.chunk_capacity,
        prep.kg, prep.t, prep.rq, prep.rk, states, adj_states, states_edge, adj_edge,
        dq, dk, dbeta, dg, partials, scale, l2norm, _ctas(device.index),
    )  # fmt: skip
    return dq, dk, y, dbeta, dg, partials


def reduce(partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A_log and of dt_bias; see `_stages`."""
    v_heads, device = partials.shape[1], partials.device
    da_log = empty((v_heads,), torch.float32, device)
    dbias = empty((v_heads, HEAD_DIM), torch.float32, device)
    launch(_library("kda_out"), "kda_reduce", device, partials, da_log, dbias)
    return da_log, dbias


def sigmoid(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """Betas of logits [B, T, HV], as `_gates.beta_forward`."""
    beta: torch.Tensor = empty(logits.shape, torch.float32, logits.device)
    launch(_library("kda_prep"), "kda_sigmoid", logits.device, logits, scale, beta)
    return beta


def sigmoid_backward(d_beta: torch.Tensor, logits: torch.Tensor, scale: float, to: torch.Tensor) -> None:
    """Writes the gradient of logits, as `_gates.beta_backward`, in the dtype and to the strides of `to`."""
    device = logits.device
    launch(_library("kda_prep"), "kda_sigmoid_backward", device, d_beta, logits, scale, to)


def tables(seqs: Sequences, device: torch.device) -> torch.Tensor:
    """What the kernels read of sequences and chunks, int32."""
    return plan_tables(seqs, device, _plans)


def library() -> Any:
    """What plays the recordings of a call."""
    return _library("kda_prep")


def logical_states(images: torch.Tensor) -> torch.Tensor:
    """The states of a tape [slots, HV, 128, 128] as the twins hold them, rows of V and columns of K."""
    return _logical(images)


def logical_prep(prep: Prep, seqs: Sequences) -> Prep:
    """A `Prep` whose rows and squares are laid out by token, as the twins'."""
    places = [64 * place + i for place, (*_, rows) in enumerate(seqs.chunks) for i in range(rows)]

    def by_token(images: torch.Tensor) -> torch.Tensor:
        chunks_first = _logical(images).movedim(1, 0)
        return chunks_first.flatten(1, 2)[:, places]

    shown = {name: by_token(getattr(prep, name)) for name in ("qg", "kg", "kr", "p", "t")}
    return prep._replace(**shown)


def _logical(images: torch.Tensor) -> torch.Tensor:
    """Tile images [..., rows, columns] without their layout.

    An image is panels of 64 columns; the 16-byte group g of row r sits at group g ^ (r % 8).
    """
    *lead, n, columns = images.shape
    rows = torch.arange(n, device=images.device)[:, None]
    groups = torch.arange(8, device=images.device)[None, :] ^ (rows & 7)
    panels = images.reshape(*lead, columns // 64, n, 8, 8)
    logical: torch.Tensor = panels[..., rows, groups, :].movedim(-4, -3).reshape(images.shape)
    return logical


def _library(name: str) -> Any:
    return loader.load("kda", name, arch=ARCH)


def _merges() -> Any:
    return loader.load("kda", "affine_merge", arch=ARCH, package="state_chain")


def _plans() -> tuple[Any, ...]:
    library = _library("kda_prep")
    return library.kda_plan, library.kda_boundaries, library.kda_cut_plan, library.kda_chosen_plan


@lru_cache(maxsize=64)
def _ctas(device: int) -> int:
    # Persistent CTAs of kda_out. Any count gives the same bits.
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gate(gate: Gate | None) -> tuple[int, torch.Tensor | None, torch.Tensor | None, float]:
    """Kind, A_log, dt_bias and bound as the host entries take them."""
    if gate is None:
        return NO_GATE, None, None, 0.0
    if gate.lower_bound is None:
        return STANDARD, gate.a_log, gate.bias, 0.0
    return BOUNDED, gate.a_log, gate.bias, gate.lower_bound


def _take(role: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    taken: torch.Tensor = scratch("kda", role, shape, torch.bfloat16, device)
    return taken


def _tape(role: str, seqs: Sequences, v: torch.Tensor, edge: bool) -> torch.Tensor:
    return _take(role, (seqs.slots(edge), v.shape[2], HEAD_DIM, HEAD_DIM), v.device)


def _states(n: int, v: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = empty((n, v.shape[2], HEAD_DIM, HEAD_DIM), torch.float32, v.device)
    return states


def _sequences(seqs: Sequences) -> int:
    return seqs.whole.n if isinstance(seqs, Segments) else seqs.n
