"""The kernels' twins in torch: the same stages with the same roundings, on a CPU or (for tests) on a GPU.

Where a kernel feeds a bf16 operand to a product, the twin rounds there too; where a kernel keeps fp32, so
does the twin. They differ by the order of sums alone, which now and then moves a rounding by one bf16 step.

Notation of one chunk, rows are tokens (i, j), all decays at most 1:
    e_i = 2^b_i    f_i = 2^(b_C - b_i)    G_ij = 2^(b_i - b_j) for i >= j, else 0    q^ = rq q    k^ = rk k
b_C is the decay of the whole chunk. A short last chunk is padded to 64 rows that repeat its last b, with
beta, q, k, v and dO of 0, so that padded rows add nothing anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch

from cake.core import state_chain, workspace
from cake.core.edges import Edges
from cake.core.segments import Segments
from cake.core.state_chain import merge
from cake.core.tiles import Tile, blocks, groups
from cake.gdn._stages import Prep
from cake.gdn.plan import CHUNK, Sequences

__all__ = ["adj", "adj_transfer", "chain", "merge", "out", "prep", "scan", "transfer"]

#: `scan`, `adj` and `out` take a part of a call's sequences.
SELECTIONS = True

BF16 = torch.bfloat16
LOG2E = 1.4426950408889634
MIN_LOG_DECAY = -88.0
NORM_EPS = 1e-6
# Below it a token writes nothing that fp32 could see beside any other.
LEAST_BETA = 2.0**-60
# From here on dbeta may be divided by beta squared, in chunks of so many tokens: nothing averages the
# roundings in shorter ones.
LEAST_DIVISOR = 2.0**-40
MANY_ROWS = 16


def prep(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences, *, l2norm: bool) -> Prep:
    """Norms, decays and chunk inverses; see `_stages`."""
    total, heads, v_heads = seqs.total, k.shape[2], g.shape[2]
    rk = _inverse_norm(k, total, l2norm)
    b = g.new_empty((v_heads, total), dtype=torch.float32)
    t = workspace.take("gdn", "t", (v_heads, total, CHUNK), BF16, k.device)
    keys, beta_rows = k.reshape(total, heads, -1), beta.reshape(total, v_heads)
    step = (g.float().clamp_min(MIN_LOG_DECAY) * LOG2E).reshape(total, v_heads)
    unit = torch.eye(CHUNK, dtype=torch.float32, device=k.device)
    for tile in blocks(seqs, v_heads, k.device):
        here = slice(tile.first, tile.first + tile.tokens.numel())
        # A padded step of 0 repeats the last b.
        decay = tile.vectors(step).cumsum(-1)
        kc = tile.rows(keys)
        norm = tile.heads_of(rk)
        gram = (kc @ kc.mT) * norm[..., :, None] * norm[..., None, :]
        lower = _decay_mask(decay, strict=True) * _grouped(gram, v_heads) * tile.vectors(beta_rows)[..., None]
        inverse = torch.linalg.solve_triangular(unit + lower, unit, upper=False, unitriangular=True)
        b[:, here] = tile.unpad(decay.permute(1, 0, 2).flatten(1), 1)
        t[:, here] = tile.unpad(inverse.permute(1, 0, 2, 3).flatten(1, 2), 1).to(t.dtype)
    return Prep(t=t, b=b, rk=rk)


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
    o: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The serial forward; see `_stages`. Per chunk, with S the state before it in bf16:

    W = v - e k^ S      D = T (beta W)      o = scale e q^ S + P D      P = scale q^ k^T G
    S' = e_C S + k^T (f D)
    """
    total, heads, dim = seqs.total, q.shape[2], q.shape[3]
    v_heads, v_dim = v.shape[2], v.shape[3]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    edge = edges.on_tape(initial_state)
    o = None if not need_output else v.new_empty(v.shape) if o is None else o
    final = edges.empty(v) if output_final_state else None
    states = None
    if save_states:
        states = workspace.take("gdn", "states", (seqs.slots(edge), v_heads, v_dim, dim), BF16, v.device)
    queries, keys = q.reshape(total, heads, dim), k.reshape(total, heads, dim)
    values, beta_rows = v.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    rq = None if o is None else _inverse_norm(q, total, l2norm)
    for group in groups(seqs, v_heads, q.device):
        state = edges.before(group, initial_state, entering, v)
        for chunk, tile in group.steps():
            now = state[: tile.count]
            rounded = _bf16(now)
            if states is not None and (edge or chunk > 0):
                slots = group.slots(chunk, tile.count, edge, after=False)
                states[slots] = rounded.mT.to(states.dtype)
            kc = _grouped(tile.rows(keys), v_heads)
            value, gate = tile.rows(values), tile.vectors(beta_rows)
            delta = _step(tile, prep, kc, value, gate, rounded, now, _bf16)
            if o is not None and rq is not None:
                decay = tile.heads_of(prep.b)
                norm = _grouped(tile.heads_of(prep.rk), v_heads)
                qc = _grouped(tile.rows(queries), v_heads)
                q_norm = _grouped(tile.heads_of(rq), v_heads)
                read = (scale * decay.exp2() * q_norm)[..., None] * (qc @ rounded)
                scores = _scores(qc, kc, q_norm, norm, decay, scale)
                tile.store(o.view(total, v_heads, v_dim), read + scores @ _bf16(delta))
        if final is not None:
            edges.store_last(group, final, state)
    return o, final, states


def transfer(
    k: torch.Tensor,
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
    total, heads, dim = seqs.total, k.shape[2], k.shape[3]
    v_heads, v_dim = v.shape[2], v.shape[3]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    b, m = edges.empty(v, seqs.n), v.new_empty((seqs.n, v_heads, dim, dim), dtype=torch.float32)
    live = torch.zeros((seqs.n, v_heads), dtype=torch.int32, device=v.device)
    keys, values = k.reshape(total, heads, dim), v.reshape(total, v_heads, v_dim)
    beta_rows = beta.reshape(total, v_heads)
    for group in groups(seqs, v_heads, v.device, edges.followed):
        start, faded = edges.warm_up(group, prep.b, least)
        start = torch.tensor(group.counts, device=v.device)[:, None] - start
        live[group.ids] = (edges.opens(group)[:, None] & ~faded).int()
        state = torch.where(start[..., None, None] > 0, 0.0, edges.before(group, initial_state, None, v))
        for chunk, tile in group.steps():
            begun = (start[: tile.count] <= chunk)[..., None, None]
            if begun.any():
                now = state[: tile.count]
                after = now.clone()
                kc = _grouped(tile.rows(keys), v_heads)
                _step(tile, prep, kc, tile.rows(values), tile.vectors(beta_rows), _bf16(now), after, _bf16)
                now.copy_(torch.where(begun, after, now))
        b[group.ids] = state
    for group in groups(seqs, v_heads, v.device, edges.mapped):
        here = live[group.ids].bool()
        unit = torch.eye(dim, device=v.device).expand(len(group.members), v_heads, dim, dim)
        state = unit.contiguous()
        for _, tile in group.steps() if here.any() else ():
            now = state[: tile.count]
            kc = _grouped(tile.rows(keys), v_heads)
            _step(tile, prep, kc, None, tile.vectors(beta_rows), _two_bf16(now), now, _two_bf16)
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
    """The serial adjoint; see `_stages`. Chunks in reverse, with R the adjoint after a chunk in bf16:

    dD = P^T dO + f k^ R      Y = T^T dD      R' = e_C R + q^T (scale e dO) - k^T (e beta Y)

    `y` gets Z = m Y, with m = beta, or 1 where beta is too small to divide by.
    """
    total, heads, dim = seqs.total, q.shape[2], q.shape[3]
    v_heads, v_dim = do.shape[2], do.shape[3]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    edge = edges.on_tape(dht)
    y = do.new_empty(do.shape) if y is None else y
    tape = workspace.take("gdn", "adj_states", (seqs.slots(edge), v_heads, v_dim, dim), BF16, do.device)
    dh0, rq = edges.empty(do) if need_dh0 else None, _inverse_norm(q, total, l2norm)
    queries, keys = q.reshape(total, heads, dim), k.reshape(total, heads, dim)
    grads, beta_rows = do.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for group in groups(seqs, v_heads, q.device):
        state = edges.after(group, dht, leaving, do)
        for chunk, tile in group.steps(reverse=True):
            now = state[: tile.count]
            rounded = _bf16(now)
            # The adjoint after a sequence's last chunk has a slot only with dht. Sequences that end with this
            # chunk are the last of the active ones.
            stored = tile.count if edge else group.active(chunk + 1)
            tape[group.slots(chunk, stored, edge, after=True)] = rounded[:stored].mT.to(tape.dtype)
            qc, kc = _grouped(tile.rows(queries), v_heads), _grouped(tile.rows(keys), v_heads)
            gate = tile.vectors(beta_rows)
            adjoint = _adjoint_step(tile, prep, rq, qc, kc, tile.rows(grads), gate, scale, rounded, now)
            tile.store(y.view(total, v_heads, v_dim), _row_factor(gate)[0][..., None] * adjoint)
        if dh0 is not None:
            edges.store_first(group, dh0, state)
    return y, tape, dh0, rq


def adj_transfer(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    beta: torch.Tensor,
    prep: Prep,
    seqs: Sequences,
    live: torch.Tensor,
    *,
    scale: float,
    l2norm: bool,
    dht: torch.Tensor | None = None,
    least: float | None = None,
) -> torch.Tensor:
    """The B of the adjoint maps R_in = M^T R_out + B of segments; see `_stages`."""
    total, heads, dim = seqs.total, q.shape[2], q.shape[3]
    v_heads, v_dim = do.shape[2], do.shape[3]
    edges = Edges(seqs, (v_heads, dim, v_dim))
    b, rq = edges.empty(do, seqs.n), _inverse_norm(q, total, l2norm)
    queries, keys = q.reshape(total, heads, dim), k.reshape(total, heads, dim)
    grads, beta_rows = do.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for group in groups(seqs, v_heads, do.device, edges.opened):
        reach, faded = edges.warm_up(group, prep.b, least, reverse=True)
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
                qc, kc = _grouped(tile.rows(queries), v_heads), _grouped(tile.rows(keys), v_heads)
                gate = tile.vectors(beta_rows)
                _adjoint_step(tile, prep, rq, qc, kc, tile.rows(grads), gate, scale, _bf16(now), before)
                now.copy_(torch.where(begun, before, now))
        b[group.ids] = state
    return b


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
    into: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parallel rest of the backward; see `_stages`. Per chunk, from S, R, Z = m Y and D, made again:

    dP = scale (dO D^T) G               dL = -(Z D^T) G below the diagonal
    dq^ = scale e dO S^T + dP k^        X = -e Z S^T + dL k^        A = f D R^T
    dk^ = X + kk                        kk = A + dP^T q^ + dL^T k^
    dbeta = Z . D / beta^2              db = q^ . dq^ + k^ . X - k^ . kk
    db_C += sum k^ . A + e_C <S, R>     dg_t = sum of db from t to the end of the chunk
    dv = Z

    dg is a difference of large sums in which the two sides of every pair of tokens cancel. They do so to fp32
    because both sides use the same bf16 operands: q^ and k^ for products and row dots alike, and one rounding
    of dL, which has beta in it already. Where m isn't beta, a row counts for dbeta alone, which then is
    (Z . v + k^ . X) / m.
    """
    total, heads, dim = seqs.total, q.shape[2], q.shape[3]
    v_heads, v_dim = v.shape[2], v.shape[3]
    if into is None:
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        dbeta, dg = (v.new_empty(v.shape[:3], dtype=torch.float32) for _ in range(2))
    else:
        dq, dk, dv, dbeta, dg = into
    queries, keys = q.reshape(total, heads, dim), k.reshape(total, heads, dim)
    values, grads = v.reshape(total, v_heads, v_dim), do.reshape(total, v_heads, v_dim)
    adjoints, beta_rows = y.reshape(total, v_heads, v_dim), beta.reshape(total, v_heads)
    for tile in blocks(seqs, v_heads, q.device):
        decay = tile.heads_of(prep.b)
        grow, fade, last = _decays(decay)
        mask = _decay_mask(decay, strict=False)
        q_norm, k_norm = tile.heads_of(rq), tile.heads_of(prep.rk)
        q_hat = _bf16(q_norm[..., None] * tile.rows(queries))
        k_hat = _bf16(k_norm[..., None] * tile.rows(keys))
        qg, kg = _grouped(q_hat, v_heads), _grouped(k_hat, v_heads)
        value, grad, adjoint = tile.rows(values), tile.rows(grads), tile.rows(adjoints)
        gate = tile.vectors(beta_rows)[..., None]
        state = tile.states(states, seqs, states_edge, after=False)
        adj_state = tile.states(adj_states, seqs, adj_edge, after=True)

        residual = value - grow[..., None] * (kg @ state.mT)
        delta = _bf16(tile.rows_of(prep.t) @ _bf16(gate * residual))
        d_scores = _bf16(scale * mask * (grad @ delta.mT))
        by, live = (x[..., None] for x in _row_factor(gate[..., 0]))
        d_lower = _bf16(-torch.tril(mask, -1) * (adjoint @ delta.mT))

        d_query = _bf16((scale * grow)[..., None] * grad) @ state + d_scores @ kg
        erased = _bf16(-grow[..., None] * adjoint) @ state + d_lower @ kg
        written = _bf16(fade[..., None] * delta) @ adj_state
        d_key = written + d_scores.mT @ qg + (live * d_lower).mT @ kg

        erased_dot = _dot(kg, erased)
        db = _dot(qg, d_query) + live[..., 0] * erased_dot - _dot(kg, d_key)
        # A padded last row passes this on to the chunk's last token: the padded db are 0.
        db[..., -1] += _dot(kg, written).sum(-1) + last * (state * adj_state).sum((-2, -1))
        tile.store(dg.view(total, v_heads), db.flip(-1).cumsum(-1).flip(-1))
        # Y . D / beta, from the diagonal of what dL is made of; the sums for small betas and few tokens.
        divisor, small = by[..., 0], gate[..., 0].abs() < LEAST_DIVISOR
        if tile.pad is not None:
            small |= ((~tile.pad).sum(-1) < MANY_ROWS)[:, None, None]
        sums = (_dot(adjoint, value) + erased_dot) / divisor
        tile.store(
            dbeta.view(total, v_heads), torch.where(small, sums, _dot(adjoint, delta) / divisor / divisor)
        )
        tile.store(dv.view(total, v_heads, v_dim), live * adjoint)

        d_query, d_key = _group_sum(d_query, heads), _group_sum(live * erased + d_key, heads)
        if l2norm:
            d_query = q_norm[..., None] * (d_query - q_hat * _dot(q_hat, d_query)[..., None])
            d_key = k_norm[..., None] * (d_key - k_hat * _dot(k_hat, d_key)[..., None])
        tile.store(dq.view(total, heads, dim), d_query)
        tile.store(dk.view(total, heads, dim), d_key)
    return dq, dk, dv, dbeta, dg


def _step(
    tile: Tile,
    prep: Prep,
    k: torch.Tensor,
    value: torch.Tensor | None,
    gate: torch.Tensor,
    rounded: torch.Tensor,
    state: torch.Tensor,
    operand: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Takes the state over a chunk, in place; returns D. `rounded` is the state as products see it."""
    grow, fade, last = _decays(tile.heads_of(prep.b))
    norm = _grouped(tile.heads_of(prep.rk), gate.shape[1])
    erased = (grow * norm)[..., None] * (k @ rounded)
    weighted = operand(gate[..., None] * (-erased if value is None else value - erased))
    delta = tile.rows_of(prep.t) @ weighted
    write = k.mT @ operand((fade * norm)[..., None] * delta)
    torch.addcmul(write, last[..., None, None], state, out=state)
    return delta


def _adjoint_step(
    tile: Tile,
    prep: Prep,
    rq: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    grad: torch.Tensor,
    gate: torch.Tensor,
    scale: float,
    rounded: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Takes the adjoint state back over a chunk, in place; returns Y."""
    decay, v_heads = tile.heads_of(prep.b), gate.shape[1]
    grow, fade, last = _decays(decay)
    q_norm, norm = (_grouped(tile.heads_of(x), v_heads) for x in (rq, prep.rk))
    scores = _scores(q, k, q_norm, norm, decay, scale)
    d_delta = (fade * norm)[..., None] * (k @ rounded) + scores.mT @ grad
    adjoint = tile.rows_of(prep.t).mT @ _bf16(d_delta)
    read = q.mT @ _bf16((scale * grow * q_norm)[..., None] * grad)
    erase = k.mT @ _bf16((grow * norm * gate)[..., None] * adjoint)
    torch.addcmul(read - erase, last[..., None, None], state, out=state)
    return adjoint


def _row_factor(beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m, which is beta, or 1 where beta is too small to divide by; and 1 where it is beta, else 0."""
    live = beta.abs() >= LEAST_BETA
    return torch.where(live, beta, 1.0), live.float()


def _inverse_norm(x: torch.Tensor, total: int, l2norm: bool) -> torch.Tensor:
    """fp32 [H, total]."""
    if not l2norm:
        return x.new_ones((x.shape[2], total), dtype=torch.float32)
    square = x.float().square().sum(-1).reshape(total, -1)
    return (square + NORM_EPS).rsqrt().T.contiguous()


def _decays(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e = 2^b, f = 2^(b_C - b) [count, h, 64] and e_C [count, h]."""
    last = b[..., -1]
    return b.exp2(), (last[..., None] - b).exp2(), last.exp2()


def _decay_mask(b: torch.Tensor, *, strict: bool) -> torch.Tensor:
    """G [count, h, 64, 64]; entries above the diagonal never meet an exponential, which could overflow."""
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=b.device).triu(0 if strict else 1)
    return (b[..., :, None] - b[..., None, :]).masked_fill(above, float("-inf")).exp2()


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """P = scale q^ k^T G in bf16."""
    mask = _decay_mask(decay, strict=False)
    return _bf16((scale * q_norm)[..., :, None] * k_norm[..., None, :] * mask * (q @ k.mT))


def _bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bf16, in fp32."""
    return x.to(torch.bfloat16).float()


def _two_bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to a sum of two bf16, in fp32."""
    high = _bf16(x)
    return high + _bf16(x - high)


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1)


def _grouped(x: torch.Tensor, v_heads: int) -> torch.Tensor:
    """[count, H, ...] -> [count, HV, ...]: v head h reads q/k head h // (HV / H)."""
    return x if x.shape[1] == v_heads else x.repeat_interleave(v_heads // x.shape[1], dim=1)


def _group_sum(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[count, HV, ...] -> [count, H, ...]: the sum over each group in ascending order."""
    if x.shape[1] == heads:
        return x
    members = x.view(x.shape[0], heads, -1, *x.shape[2:]).unbind(2)
    return reduce(torch.add, members)
