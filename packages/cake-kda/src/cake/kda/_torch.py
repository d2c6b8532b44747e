"""The reference backend: the stages in torch, with the roundings of kernels that feed bf16 to their products.

fp32 arithmetic, on a CPU or, when asked for, on a GPU; boundaries have to be known on the host. Notation of
one chunk, rows are tokens (i, j), per key channel: b the inclusive sum of log2 decays, b_C its last row,
q^ = rq q, k^ = rk k, and `Prep`'s

    Qg = scale q^ 2^b      Kg = k^ 2^b      Kr = k^ 2^(b_C - b)      P = scale A      T = (I + beta N)^-1

with A and N the decayed products of `_pairs`. A short last chunk is padded to 64 rows that repeat its last b,
with beta, q, k, v and dO of 0, so that padded rows add nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold

import torch

from cake.core import state_chain, workspace
from cake.core.edges import Edges
from cake.core.segments import Segments
from cake.core.sequences import CHUNK, Sequences
from cake.core.state_chain import merge
from cake.core.tiles import Tile, blocks, groups
from cake.kda import _pairs
from cake.kda._gates import log_decay, log_decay_backward
from cake.kda._pairs import bf16
from cake.kda._stages import Gate, Prep

__all__ = ["adj", "adj_transfer", "chain", "merge", "out", "prep", "reduce", "scan", "transfer"]

#: `scan`, `adj` and `out` take a part of a call's sequences.
SELECTIONS = True

BF16 = torch.bfloat16
LOG2E = 1.4426950408889634
NORM_EPS = 1e-6
# Below it a token writes nothing that fp32 could see beside any other.
LEAST_BETA = 2.0**-60
# Values that one step of a sum adds up: few enough that a GPU never splits them by its number of SMs.
_FAN_IN = 128


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
    """Decayed rows, inner products and inverses of every chunk; see `_stages`."""
    total, dim, v_heads = seqs.total, q.shape[3], g.shape[2]
    rows, squares = (v_heads, total, dim), (v_heads, total, CHUNK)
    made = Prep(
        qg=_take("qg", rows, q),
        kg=_take("kg", rows, q),
        kr=_take("kr", rows, q),
        p=_take("p", squares, q),
        t=_take("t", squares, q),
        last=q.new_empty((seqs.chunk_capacity, v_heads, dim), dtype=torch.float32),
        rq=_inverse_norm(q, total, l2norm),
        rk=_inverse_norm(k, total, l2norm),
    )
    unit = torch.eye(CHUNK, dtype=torch.float32, device=q.device)
    for tile in blocks(seqs, v_heads, q.device):
        b = _cumulative(tile, g, gate)
        last = b[..., -1:, :]
        q_hat, k_hat = (_unit_rows(tile, x, r, v_heads) for x, r in ((q, made.rq), (k, made.rk)))
        a, n = _pairs.forward(q_hat, k_hat, b)
        lower = tile.vectors(beta.reshape(total, v_heads))[..., None] * n
        inverse = torch.linalg.solve_triangular(unit + lower, unit, upper=False, unitriangular=True)
        grow = b.exp2()
        tokens = slice(tile.first, tile.first + tile.tokens.numel())
        for x, values in (
            (made.qg, scale * q_hat * grow),
            (made.kg, k_hat * grow),
            (made.kr, k_hat * (last - b).exp2()),
            (made.p, scale * a),
            (made.t, inverse),
        ):
            x[:, tokens] = tile.unpad(values.transpose(0, 1).flatten(1, 2), 1).to(x.dtype)
        made.last[slice(*_span(tile))] = last[..., 0, :].exp2()
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
    o: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The serial forward; see `_stages`. Per chunk, with S the state before it in bf16:

    W = v - Kg S      D = T (beta W)      o = Qg S + P D      S' = 2^(b_C) S + Kr^T D
    """
    total, v_heads, v_dim, dim = seqs.total, v.shape[2], v.shape[3], prep.kg.shape[-1]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    edge = edges.on_tape(initial_state)
    o = None if not need_output else v.new_empty(v.shape) if o is None else o
    final = edges.empty(v) if output_final_state else None
    states = _take("states", (seqs.slots(edge), v_heads, v_dim, dim), v) if save_states else None
    values, beta_rows = v.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for group in groups(seqs, v_heads, v.device):
        state = edges.before(group, initial_state, entering, v)
        for chunk, tile in group.steps():
            now = state[: tile.count]
            rounded = bf16(now)
            if states is not None and (edge or chunk > 0):
                slots = group.slots(chunk, tile.count, edge, after=False)
                states[slots] = rounded.mT.to(states.dtype)
            last = prep.last[group.chunks(chunk, tile.count)]
            value, weight = tile.rows(values), tile.vectors(beta_rows)
            delta = _step(tile, prep, last, value, weight, rounded, now, bf16)
            if o is not None:
                read = tile.rows_of(prep.qg) @ rounded + tile.rows_of(prep.p) @ delta
                tile.store(o.view(total, v_heads, v_dim), read)
        if final is not None:
            edges.store_last(group, final, state)
    return o, final, states


def transfer(
    v: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    *,
    initial_state: torch.Tensor | None = None,
    least: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The maps S_out = M S_in + B of segments; see `_stages`.

    B is the walk of `scan` from a zero state. M is the same walk of the unit matrix with v = 0; the operands
    that hold it are a sum of two bf16, since a map that is chained must be better than one step's rounding.
    """
    total, v_heads, v_dim, dim = seqs.total, v.shape[2], v.shape[3], prep.kg.shape[-1]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    b, m = edges.empty(v, seqs.n), v.new_empty((seqs.n, v_heads, dim, dim), dtype=torch.float32)
    live = torch.zeros((seqs.n, v_heads), dtype=torch.int32, device=v.device)
    values, beta_rows = v.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    decays = _decays_at_ends(prep, seqs, least)
    for group in groups(seqs, v_heads, v.device, edges.followed):
        reach, faded = edges.warm_up(group, decays, least)
        start = torch.tensor(group.counts, device=v.device)[:, None] - reach
        live[group.ids] = (edges.opens(group)[:, None] & ~faded).int()
        state = torch.where(start[..., None, None] > 0, 0.0, edges.before(group, initial_state, None, v))
        for chunk, tile in group.steps():
            begun = (start[: tile.count] <= chunk)[..., None, None]
            if begun.any():
                now = state[: tile.count]
                after = now.clone()
                last = prep.last[group.chunks(chunk, tile.count)]
                value, weight = tile.rows(values), tile.vectors(beta_rows)
                _step(tile, prep, last, value, weight, bf16(now), after, bf16)
                now.copy_(torch.where(begun, after, now))
        b[group.ids] = state
    for group in groups(seqs, v_heads, v.device, edges.mapped):
        here = live[group.ids].bool()
        unit = torch.eye(dim, device=v.device).expand(len(group.members), v_heads, dim, dim)
        state = unit.contiguous()
        for chunk, tile in group.steps() if here.any() else ():
            now = state[: tile.count]
            last = prep.last[group.chunks(chunk, tile.count)]
            _step(tile, prep, last, None, tile.vectors(beta_rows), _two_bf16(now), now, _two_bf16)
        m[group.ids] = torch.where(here[..., None, None], state, 0.0)
    return b, m, live


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
    return state_chain.chain(b, m, live, seqs, adjoint=adjoint)


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
    """The serial adjoint; see `_stages`. Chunks in reverse, with R the adjoint after a chunk in bf16:

    dD = P^T dO + Kr R      Y = T^T dD      R' = 2^(b_C) R + Qg^T dO - Kg^T (beta Y)
    """
    total, v_heads, v_dim, dim = seqs.total, do.shape[2], do.shape[3], prep.kg.shape[-1]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    edge = edges.on_tape(dht)
    y = do.new_empty(do.shape) if y is None else y
    tape = _take("adj_states", (seqs.slots(edge), v_heads, v_dim, dim), do)
    dh0 = edges.empty(do) if need_dh0 else None
    grads, beta_rows = do.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for group in groups(seqs, v_heads, do.device):
        state = edges.after(group, dht, leaving, do)
        for chunk, tile in group.steps(reverse=True):
            now = state[: tile.count]
            rounded = bf16(now)
            # The adjoint after a sequence's last chunk has a slot only with dht. Sequences that end with this
            # chunk are the last of the active ones.
            stored = tile.count if edge else group.active(chunk + 1)
            tape[group.slots(chunk, stored, edge, after=True)] = rounded[:stored].mT.to(tape.dtype)
            last = prep.last[group.chunks(chunk, tile.count)]
            adjoint = _adjoint_step(tile, prep, last, tile.rows(grads), tile.vectors(beta_rows), rounded, now)
            tile.store(y.view(total, v_heads, v_dim), adjoint)
        if dh0 is not None:
            edges.store_first(group, dh0, state)
    return y, tape, dh0


def adj_transfer(
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    live: torch.Tensor,
    *,
    dht: torch.Tensor | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """The B of the adjoint maps R_in = M^T R_out + B of segments; see `_stages`."""
    total, v_heads, v_dim, dim = seqs.total, do.shape[2], do.shape[3], prep.kg.shape[-1]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    b = edges.empty(do, seqs.n)
    grads, beta_rows = do.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    decays = _decays_at_ends(prep, seqs, least)
    for group in groups(seqs, v_heads, do.device, edges.opened):
        reach, faded = edges.warm_up(group, decays, least, reverse=True)
        count = torch.tensor(group.counts, device=do.device)[:, None]
        # The forward has decided which maps vanish; a segment whose end is known may start late all the same.
        late = torch.where(edges.goes_on(group)[:, None], live[group.ids] == 0, faded)
        reach = torch.where(late, reach, count)
        state = torch.where((reach < count)[..., None, None], 0.0, edges.after(group, dht, None, do))
        for chunk, tile in group.steps(reverse=True):
            begun = (reach[: tile.count] > chunk)[..., None, None]
            if begun.any():
                now = state[: tile.count]
                before = now.clone()
                last = prep.last[group.chunks(chunk, tile.count)]
                grad, weight = tile.rows(grads), tile.vectors(beta_rows)
                _adjoint_step(tile, prep, last, grad, weight, bf16(now), before)
                now.copy_(torch.where(begun, before, now))
        b[group.ids] = state
    return b


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
    into: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The parallel rest of the backward; see `_stages`. Per chunk, from S, R, Y and the rebuilt D alone:

    dA = scale (dO D^T) for i >= j              dL = -(Y D^T) for i > j
    dq^ = scale 2^b (dO S^T) + [A]              X = -2^b (Y S^T) + [N in its row's k^]
    dk^ = beta X + kk                           kk = 2^(b_C - b) (D R^T) + [A, N in their column's k^]
    dbeta = Y . v + k^ . X                      dv = beta Y
    db = Qg (dO S^T) - beta Kg (Y S^T) - Kr (D R^T) + [A, N]
    db_C += sum Kr (D R^T) + 2^(b_C) <S, R>     dlog = sum of db from each token to the end of the chunk

    [A] and [N] are the pairs' gradients with dA and beta dL (`_pairs`). db takes the operands that the
    products used, as they were rounded for them: the two sides of each pair then cancel in it to fp32. X is
    kept as m X, with m = beta, or 1 where beta is too small to divide dbeta by.
    """
    total, heads, dim = seqs.total, q.shape[2], q.shape[3]
    v_heads, v_dim = v.shape[2], v.shape[3]
    if into is None:
        dq, dk, dv, dg = (x.new_empty(x.shape) for x in (q, k, v, g))
        dbeta = v.new_empty(v.shape[:3], dtype=torch.float32)
    else:
        dq, dk, dv, dbeta, dg = into
    partials = None
    if gate is not None:
        partials = v.new_empty((seqs.chunk_capacity, v_heads, 1 + dim), dtype=torch.float32)
    values, grads = v.reshape(total, v_heads, v_dim), do.reshape(total, v_heads, v_dim)
    adjoints, beta_rows = y.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for tile in blocks(seqs, v_heads, q.device):
        b = _cumulative(tile, g, gate)
        grow, fade = b.exp2(), (b[..., -1:, :] - b).exp2()
        q_hat, k_hat = (_unit_rows(tile, x, r, v_heads) for x, r in ((q, prep.rq), (k, prep.rk)))
        qg, kg, kr = (tile.rows_of(x) for x in (prep.qg, prep.kg, prep.kr))
        value, grad, adjoint = tile.rows(values), tile.rows(grads), tile.rows(adjoints)
        weight = tile.vectors(beta_rows)[..., None]
        state = tile.states(states, seqs, states_edge, after=False)
        adj_state = tile.states(adj_states, seqs, adj_edge, after=True)

        delta = bf16(tile.rows_of(prep.t) @ bf16(weight * (value - kg @ state.mT)))
        live = (weight.abs() >= LEAST_BETA).float()
        by = torch.where(live > 0, weight, 1.0)
        d_a = torch.tril(bf16(scale * (grad @ delta.mT)))
        # m dL is rounded once and serves row i and column j of a pair alike.
        d_n = torch.tril(bf16(-by * (adjoint @ delta.mT)), -1)
        pairs = _pairs.backward(d_a, d_n, live, q_hat, k_hat, b)

        read, erased, written = grad @ state, -by * (adjoint @ state), delta @ adj_state
        d_query = scale * grow * read + pairs.q
        d_query_key = grow * erased + pairs.query_key
        d_key = live * d_query_key + fade * written + pairs.key

        db = qg * read + live * kg * erased - kr * written + pairs.b
        # A padded last row passes this on to the chunk's last token: the padded db are 0.
        last = prep.last[list(seqs.chunk_places[slice(*_span(tile))])]
        db[..., -1, :] += (kr * written).sum(-2) + last * (state * adj_state).sum(-2)
        d_log = db.flip(-2).cumsum(-2).flip(-2)
        if gate is None:
            d_raw = d_log
        else:
            assert partials is not None
            d_raw, d_a_log = _gate_backward(tile, g, d_log, gate)
            partials[slice(*_span(tile)), :, 0] = d_a_log.sum((-2, -1))
            partials[slice(*_span(tile)), :, 1:] = d_raw.sum(-2)
        tile.store(dg.view(total, v_heads, dim), d_raw)
        d_weight = (adjoint * value).sum(-1) + (k_hat * d_query_key).sum(-1) / by[..., 0]
        tile.store(dbeta.view(total, v_heads), d_weight)
        tile.store(dv.view(total, v_heads, v_dim), weight * adjoint)
        for dx, unit_rows, r, d_unit in ((dq, q_hat, prep.rq, d_query), (dk, k_hat, prep.rk, d_key)):
            d_rows = _group_sum(d_unit, heads)
            if l2norm:
                row = unit_rows[:, :: v_heads // heads]
                d_rows = tile.heads_of(r)[..., None] * (d_rows - row * (row * d_rows).sum(-1, keepdim=True))
            tile.store(dx.view(total, heads, dim), d_rows)
    return dq, dk, dv, dbeta, dg, partials


def reduce(partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A_log and of dt_bias: sums over chunks in a fixed tree; see `_stages`."""
    x = partials
    while x.shape[0] > 1:
        steps = -(-x.shape[0] // _FAN_IN)
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, steps * _FAN_IN - x.shape[0]))
        x = x.view(steps, _FAN_IN, *x.shape[1:]).sum(1)
    return x[0, :, 0], x[0, :, 1:]


def _step(
    tile: Tile,
    prep: Prep,
    last: torch.Tensor,
    value: torch.Tensor | None,
    weight: torch.Tensor,
    rounded: torch.Tensor,
    state: torch.Tensor,
    operand: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Takes the state over a chunk, in place; returns D. `rounded` is the state as products see it."""
    erased = tile.rows_of(prep.kg) @ rounded
    weighted = operand(weight[..., None] * (-erased if value is None else value - erased))
    delta = operand(tile.rows_of(prep.t) @ weighted)
    torch.addcmul(tile.rows_of(prep.kr).mT @ delta, last[..., None], state, out=state)
    return delta


def _adjoint_step(
    tile: Tile,
    prep: Prep,
    last: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    rounded: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Takes the adjoint state back over a chunk, in place; returns Y."""
    d_delta = tile.rows_of(prep.p).mT @ grad + tile.rows_of(prep.kr) @ rounded
    adjoint = tile.rows_of(prep.t).mT @ bf16(d_delta)
    erase = tile.rows_of(prep.kg).mT @ bf16(weight[..., None] * adjoint)
    torch.addcmul(tile.rows_of(prep.qg).mT @ grad - erase, last[..., None], state, out=state)
    return adjoint


def _decays_at_ends(prep: Prep, seqs: Sequences, least: float | None) -> torch.Tensor:
    """log2 of each chunk's whole decay at its last token, [HV, total, K]; no one looks without `least`."""
    if least is None:
        return prep.last
    ends = prep.last.new_zeros((prep.last.shape[1], seqs.total, prep.last.shape[2]))
    tokens = [start + rows - 1 for _, _, start, rows in seqs.chunks]
    ends[:, tokens] = prep.last[list(seqs.chunk_places)].log2().transpose(0, 1)
    return ends


def _two_bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to a sum of two bf16, in fp32."""
    high = bf16(x)
    return high + bf16(x - high)


def _take(role: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return workspace.take("kda", role, shape, BF16, like.device)


def _span(tile: Tile) -> tuple[int, int]:
    assert tile.span is not None
    return tile.span


def _cumulative(tile: Tile, g: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """b, fp32 [count, HV, 64, K]; padded rows repeat the last one."""
    step = log_decay(tile.rows(g.flatten(0, 1)), gate)
    if tile.pad is not None:
        step = step.masked_fill(tile.pad[:, None, :, None], 0)
    return (step * LOG2E).cumsum(-2)


def _gate_backward(
    tile: Tile, g: torch.Tensor, d_log: torch.Tensor, gate: Gate
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the raw gate and of A_log at each value, 0 in padded rows."""
    if tile.pad is not None:
        d_log = d_log.masked_fill(tile.pad[:, None, :, None], 0)
    return log_decay_backward(tile.rows(g.flatten(0, 1)), d_log, gate)


def _inverse_norm(x: torch.Tensor, total: int, l2norm: bool) -> torch.Tensor:
    """fp32 [H, total]."""
    if not l2norm:
        return x.new_ones((x.shape[2], total), dtype=torch.float32)
    square = x.float().square().sum(-1).reshape(total, -1)
    return (square + NORM_EPS).rsqrt().T.contiguous()


def _unit_rows(tile: Tile, x: torch.Tensor, r: torch.Tensor, v_heads: int) -> torch.Tensor:
    """q^ or k^, fp32 [count, HV, 64, K]: v head h reads q/k head h // (HV / H)."""
    rows = tile.heads_of(r)[..., None] * tile.rows(x.flatten(0, 1))
    return rows.repeat_interleave(v_heads // x.shape[2], dim=1)


def _group_sum(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[count, HV, ...] -> [count, H, ...]: the sum over each group in ascending order."""
    if x.shape[1] == heads:
        return x
    members = x.view(x.shape[0], heads, -1, *x.shape[2:]).unbind(2)
    return fold(torch.add, members)
