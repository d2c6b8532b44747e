"""The stages of the op and who runs them: torch twins (`_torch`) on a CPU, CUDA kernels (`_cuda`) on sm_90.

Both modules define the same functions. H heads of q and k, HV heads of v, `total` flat tokens, chunks
and slots as in `plan`. q, k [B, T, H, 128] and v, do [B, T, HV, 128] are bf16 with a contiguous last
dimension and any other strides; g and beta are fp32 or bf16 [B, T, HV] with any strides; states are
contiguous fp32 [n, HV, K, V]. None of them is called without tokens.

``prep(k, g, beta, seqs, *, l2norm) -> Prep``
    What both directions share: the keys' norms, decays, the chunk inverses.
``scan(q, k, v, beta, prep, seqs, *, scale, l2norm, initial_state=None, entering=None,
output_final_state=False, save_states=False, need_output=True, o=None) -> (o | None, final_state | None,
states | None)``
    The serial forward. `states` is the tape, bf16 [slots, HV, V, K]: the state before each chunk as the
    products used it.
``adj(q, k, do, beta, prep, seqs, *, scale, l2norm, dht=None, leaving=None, need_dh0=False, y=None) ->
(y, adj_states, dh0 | None, rq)``
    The serial adjoint. y bf16 [B, T, HV, 128] is dv, beta times the adjoint of each token's delta, and where
    |beta| < 2^-60 that adjoint itself. `adj_states` bf16 [slots, HV, V, K] is the adjoint state after each
    chunk. rq fp32 [H, total] is 1 / sqrt(sum q^2 + 1e-6) of each row, or 1 without the L2 norm: walks find it
    where they have q at hand, and `out` needs it again.

Of a call that is cut, `seqs` are its `Segments`, `scan` gets ``entering`` and `adj` gets ``leaving``, fp32
[segments, HV, K, V]: the states where segments meet. Then initial_state, final_state, dht and dh0 still have
a row for each sequence, and both tapes a slot for each chunk. `transfer`, `adj_transfer` and `merge` make
them:

``transfer(k, v, beta, prep, seqs, *, initial_state=None, least=None) -> (b, m, live)``
    The map S_out = M S_in + B of each segment that another one follows: b fp32 [segments, HV, K, V], m fp32
    [segments, HV, K, K], live int32 [segments, HV]. Without a segment before it b is the state that leaves,
    walked from the initial one. Where the decay of a segment is below e^least, M counts as 0: live is 0, m is
    0, and b may be walked over the last chunks alone. Rows that nobody needs are undefined.
``adj_transfer(q, k, do, beta, prep, seqs, live, *, scale, l2norm, dht=None, least=None) -> b``
    The B of R_in = M^T R_out + B, of each segment with one before it; alike.
``chain(b, m, live, prep, seqs, *, adjoint=False) -> states``
    What `scan` takes as ``entering``, or of the adjoint maps what `adj` takes as ``leaving``.
``merge(b, m, chains, n_out, *, live=None, transposed=False, columns=None, out=None) -> states``
    See `cake.core.state_chain`.

``out(q, k, v, do, y, beta, prep, states, adj_states, rq, seqs, *, scale, l2norm, states_edge, adj_edge,
into=None) -> (dq, dk, dv, dbeta, dg)``
    The parallel rest of the backward; dq, dk, dv bf16, dbeta and dg fp32. dv may take over
    y's storage: then nothing of it needs writing but what y is not. `y` of `adj` and `into` = (dq, dk, dv,
    dbeta, dg) say where results go: rows of dq, dk and dv like those of inputs, dbeta and dg fp32 or bf16 of
    any strides. The kernels take dv alone for y.

Where a backend says `SELECTIONS`, as the torch twins do, `seqs` may also be a selection of the call's
sequences (`Sequences.select`): the walks and `out` then write its tokens alone, into `o`, `y` and `into`, and
number their tapes by the selection; `prep` is always the whole call's.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Prep(NamedTuple):
    """What `prep` makes of a call.

    t: bf16 [HV, total, 64]. Row i of a chunk's T = (I + L)^-1, with L_ij = beta_i k^_i . k^_j 2^(b_i - b_j)
       for i > j; columns past the chunk's tokens are 0.
    b: fp32 [HV, total]. Inclusive sum over the chunk of log2(e) * max(g, -88).
    rk: fp32 [H, total]. 1 / sqrt(sum k^2 + 1e-6) of each row, or 1 without the L2 norm.
    plan: the CUDA backend's tables of sequences and chunks, int32; None elsewhere.
    """

    t: torch.Tensor
    b: torch.Tensor
    rk: torch.Tensor
    plan: torch.Tensor | None = None


def backend_name(device: torch.device) -> str:
    """What runs the stages for tensors on `device`: the torch twins or the CUDA kernels.

    Raises:
        NotImplementedError: no backend serves the device; the message names its architecture.
    """
    if device.type == "cpu":
        return "torch"
    if device.type != "cuda":
        raise NotImplementedError(f"cake.gdn runs on CPU and CUDA tensors, got device {device}")
    index: Any = device.index
    capability = _capability(torch.cuda.current_device() if index is None else index)
    if capability != (9, 0):
        raise NotImplementedError(
            f"cake.gdn has CUDA kernels for sm_90 alone, got sm_{capability[0]}{capability[1]} ({device})"
        )
    return "cuda"


def check_context(backend: str) -> None:
    """Refuses a context that the backend's stages don't serve.

    Raises:
        NotImplementedError: no stages for sequences that other ranks go on with.
    """
    if not hasattr(stages(backend), "transfer"):
        raise NotImplementedError(f"cp_context isn't served by the {backend} backend")


@lru_cache(maxsize=8)
def stages(backend: str) -> ModuleType:
    """The module with the four stage functions of a backend, "torch" or "cuda"."""
    return import_module(f"cake.gdn._{backend}")


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
