"""Chains of affine maps of states, ``S_out = M S_in + B``: their merge on a CPU, and the kernel's choices.

An op carries the kernel (`kernels/state_chain`); how many columns of the state a block of it takes is chosen
here, in one table. Every choice gives the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain as joined
from typing import Any

import torch

from cake.core.checks import check_tensor
from cake.core.recording import address, empty, launch
from cake.core.segments import Segments, UnseenSegments

__all__ = [
    "COLUMNS",
    "Step",
    "chain",
    "check",
    "columns_per_block",
    "launch_chain",
    "launch_merge",
    "merge",
    "tables",
]

STATE = 128
#: Chains and steps of one launch of the kernel.
MOST_CHAINS, MOST_STEPS = 128, 640
#: Columns of a block that the kernel is built for, and columns of a state that it takes.
COLUMNS = (8, 16, 32, 64)
STATE_COLUMNS = (128, 256)
#: By architecture: (largest n_chains * ncols / 128, columns per block), ascending; the last one has no bound.
#: Measured on an H200 (`tools/merge_bench.py`), 16 steps, ncols 128 and 256: the narrowest block whose grid
#: is one wave of 132 is fastest; three waves of 32 columns are faster than two of 64.
BANDS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "sm_90a": ((8, 8), (16, 16), (33, 32), (66, 64), (99, 32), (None, 64)),
}

#: One link of a chain: (tile of B, tile of M or -1 for M = 0, row of the result or -1 where it isn't needed).
Step = tuple[int, int, int]


def columns_per_block(n_chains: int, ncols: int, arch: str, columns: int | None = None) -> int:
    """Columns per block of a merge.

    Args:
        n_chains: chains times heads, at least 1.
        ncols: columns of a state, 128 or 256.
        arch: as in "sm_90a".
        columns: this number, if the kernel is built for it.

    Raises:
        ValueError: anything else, an unknown architecture among it.
    """
    if n_chains < 1:
        raise ValueError(f"n_chains must be at least 1, got {n_chains}")
    if ncols not in STATE_COLUMNS:
        raise ValueError(f"ncols must be one of {STATE_COLUMNS}, got {ncols}")
    if arch not in BANDS:
        raise ValueError(f"merges are planned for {', '.join(BANDS)}, got architecture {arch!r}")
    if columns is not None:
        if columns not in COLUMNS:
            raise ValueError(f"columns must be one of {COLUMNS}, got {columns}")
        return columns
    load = n_chains * ncols // STATE
    return next(width for most, width in BANDS[arch] if most is None or load <= most)


def check(
    b: torch.Tensor,
    m: torch.Tensor,
    chains: Sequence[Sequence[Step]],
    n_out: int,
    live: torch.Tensor | None = None,
    columns: int | None = None,
) -> None:
    """Checks the arguments of `merge`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or number of columns, no chain, or a step out of range.
    """
    heads = b.shape[1] if b.dim() == 4 else None
    if b.dim() != 4 or b.shape[3] not in STATE_COLUMNS:
        raise ValueError(f"b must be [tiles, HV, 128, 128 or 256], got {list(b.shape)}")
    check_tensor(
        "b", b, shape={"tiles": None, "HV": heads, "K": STATE, "V": b.shape[3]}, dtypes=torch.float32
    )
    shape = {"tiles": None, "HV": heads, "K": STATE, "K_in": STATE}
    check_tensor("m", m, shape=shape, dtypes=torch.float32, device=b.device)
    if live is not None:
        shape = {"tiles": m.shape[0], "HV": heads}
        check_tensor("live", live, shape=shape, dtypes=torch.int32, device=b.device)
    if columns is not None and columns not in COLUMNS:
        raise ValueError(f"columns must be one of {COLUMNS}, got {columns}")
    if not chains or not all(chains):
        raise ValueError(f"chains must hold a chain, and each a step, got {[len(steps) for steps in chains]}")
    spans = _spans(tuple(map(tuple, chains)))
    for name, least, extent, (low, high) in zip(
        ("b", "m", "out"), (0, -1, -1), (b.shape[0], m.shape[0], n_out), spans, strict=True
    ):
        if low < least or high >= extent:
            raise ValueError(
                f"steps must name tiles of {name} from {least} to {extent - 1}, got {low} to {high}"
            )


@lru_cache(maxsize=64)
def _spans(chains: tuple[tuple[Step, ...], ...]) -> list[tuple[int, int]]:
    """Least and largest tile of B, tile of M and row that steps name."""
    columns = zip(*joined.from_iterable(chains), strict=True)
    return [(min(column), max(column)) for column in columns]


@lru_cache(maxsize=64)
def tables(chains: tuple[tuple[Step, ...], ...]) -> tuple[tuple[array[int], int], ...]:
    """What launches of the kernel take: int32 tables of whole chains, and how many chains each holds.

    Raises:
        ValueError: a chain of more than 640 steps.
    """
    made: list[tuple[array[int], int]] = []
    taken: list[tuple[Step, ...]] = []

    def close() -> None:
        ends = [0]
        for steps in taken:
            ends.append(ends[-1] + len(steps))
        made.append((array("i", (*ends, *joined.from_iterable(joined.from_iterable(taken)))), len(taken)))
        taken.clear()

    for steps in chains:
        if len(steps) > MOST_STEPS:
            raise ValueError(f"a chain must have at most {MOST_STEPS} steps, got {len(steps)}")
        if len(taken) == MOST_CHAINS or sum(map(len, taken)) + len(steps) > MOST_STEPS:
            close()
        taken.append(steps)
    close()
    return tuple(made)


def merge(
    b: torch.Tensor,
    m: torch.Tensor,
    chains: Sequence[Sequence[Step]],
    n_out: int,
    *,
    live: torch.Tensor | None = None,
    transposed: bool = False,
    columns: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """States along chains of affine maps: S = 0, then for each step (bt, mt, row) S <- M[mt] S + B[bt].

    Args:
        b: fp32 `[tiles, HV, 128, C]`, with C = 128, or 256 where maps themselves are composed.
        m: fp32 `[tiles, HV, 128, 128]`.
        chains: for each chain its steps. mt = -1 counts as M = 0; row >= 0 writes the new S to that row of
            the result, -1 to none. No row twice.
        n_out: rows of the result; those that no step names are undefined.
        live: int32 `[tiles of m, HV]`; 0 counts as M = 0 for that head, whatever M holds.
        transposed: use M^T.
        columns: columns per block of the kernel, of 8, 16, 32 and 64; no bit depends on it.
        out: written in place of a new tensor.

    Returns:
        fp32 `[n_out, HV, 128, C]`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or number of columns, no chain, or a step out of range.

    Determinism: the kernel sums products in one order, whatever its columns per block, and adds B last. M and
    S enter a product as sums of two bf16, which costs about 3e-6 of it. On a CPU it is torch's own matmul.
    """
    check(b, m, chains, n_out, live, columns)
    if out is None:
        out = b.new_empty((n_out, *b.shape[1:]))
    for steps in chains:
        state: Any = None
        for b_tile, m_tile, row in steps:
            if state is None or m_tile < 0:
                state = b[b_tile]
            else:
                product = (m[m_tile].mT if transposed else m[m_tile]) @ state
                if live is not None:
                    product = torch.where(live[m_tile, :, None, None] != 0, product, 0.0)
                state = product + b[b_tile]
            if row >= 0:
                out[row] = state
    return out


def chain(
    b: torch.Tensor, m: torch.Tensor, live: torch.Tensor, segments: Segments, *, adjoint: bool = False
) -> torch.Tensor:
    """The states where segments meet, fp32 [segments, HV, 128, 128]; rows that no one enters are undefined.

    Args:
        b, m, live: the segments' maps, as of an op's `transfer`; b of its `adj_transfer` if `adjoint`.
        segments: with boundaries on the host.
        adjoint: the adjoint state that meets each segment at its end, in place of what enters it.
    """
    chains = segments.adjoint_chains if adjoint else segments.chains
    return merge(b, m, chains, segments.n, live=live, transposed=adjoint)


def launch_merge(
    library: Any,
    arch: str,
    b: torch.Tensor,
    m: torch.Tensor,
    chains: Sequence[Sequence[Step]],
    n_out: int,
    *,
    live: torch.Tensor | None = None,
    transposed: bool = False,
    columns: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`merge` by the kernel.

    Args:
        library: an op's `affine_merge`, for `arch`.

        All others, result and errors are those of `merge`.
    """
    check(b, m, chains, n_out, live, columns)
    if out is None:
        out = b.new_empty((n_out, *b.shape[1:]))
    width = columns_per_block(len(chains) * b.shape[1], b.shape[3], arch, columns)
    _launch(library, tables(tuple(map(tuple, chains))), b, m, live, out, width, transposed)
    return out


def _launch(
    library: Any,
    parts: Iterable[tuple[array[int], int]],
    b: torch.Tensor,
    m: torch.Tensor,
    live: torch.Tensor | None,
    out: torch.Tensor,
    width: int,
    transposed: bool,
) -> None:
    for table, count in parts:
        arguments = (b, m, live, out, address(table), count, width, transposed)
        launch(library, "affine_merge", b.device, *arguments)


@lru_cache(maxsize=64)
def _tables_of(segments: Segments, adjoint: bool) -> tuple[tuple[array[int], int], ...]:
    # Found by identity: a plan is made once for calls that are alike, and its chains are many numbers.
    return tables(segments.adjoint_chains if adjoint else segments.chains)


def launch_chain(
    library: Any,
    arch: str,
    b: torch.Tensor,
    m: torch.Tensor,
    live: torch.Tensor,
    plan: torch.Tensor | None,
    segments: Segments,
    *,
    adjoint: bool = False,
) -> torch.Tensor:
    """`chain` by the kernel; `plan` holds the tables that segments which were cut on the device need."""
    states: torch.Tensor = empty(b.shape, b.dtype, b.device)
    if not isinstance(segments, UnseenSegments):
        parts = _tables_of(segments, adjoint)
        width = columns_per_block(sum(count for _, count in parts) * b.shape[1], b.shape[3], arch)
        _launch(library, parts, b, m, live, states, width, adjoint)
        return states
    width = columns_per_block(segments.whole.n * b.shape[1], b.shape[3], arch)
    launch(
        library, "affine_merge_runs", b.device,
        b, m, live, states, plan, segments.n, segments.chunk_capacity, segments.whole.n, width, adjoint,
    )  # fmt: skip
    return states
