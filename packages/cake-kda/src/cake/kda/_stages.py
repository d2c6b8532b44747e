"""The stages of the op and who runs them: torch twins (`_torch`), or CUDA kernels (`_cuda`) on sm_90.

Both are modules with the functions below. H heads of q and k, HV heads of v, `total` flat tokens,
chunks and slots as in `cake.core.sequences`. q, k [B, T, H, 128], v, do [B, T, HV, 128] are bf16 and g
[B, T, HV, 128] is fp32 or bf16, all with a contiguous last dimension and any other strides; beta is fp32 or
bf16 [B, T, HV] with any strides; states are contiguous fp32 [n, HV, K, V]. `gate` says how g becomes the log
decay; None: it is one. None of the functions is called without tokens.

``prep(q, k, g, gate, beta, seqs, *, scale, l2norm) -> Prep``
    What both directions share, chunk by chunk: decayed rows, inner products, the inverses.
``scan(v, beta, prep, seqs, *, initial_state=None, entering=None, output_final_state=False,
save_states=False, need_output=True, o=None) -> (o | None, final_state | None, states | None)``
    The serial forward. `states` is the tape, bf16 [slots, HV, V, K]: the state before each chunk as the
    products used it.
``adj(do, beta, prep, seqs, *, dht=None, leaving=None, need_dh0=False, y=None) ->
(y, adj_states, dh0 | None)``
    The serial adjoint. y bf16 [B, T, HV, 128] is the adjoint of each token's delta, `adj_states` bf16
    [slots, HV, V, K] the adjoint state after each chunk.

Of a call that is cut, `seqs` are its `Segments`, `scan` gets ``entering`` and `adj` gets ``leaving``, fp32
[segments, HV, K, V]: the states where segments meet. Then initial_state, final_state, dht and dh0 still have
a row for each sequence, and both tapes a slot for each chunk. `transfer`, `adj_transfer` and `chain` make
them:

``transfer(v, beta, prep, seqs, *, initial_state=None, least=None) -> (b, m, live)``
    The map S_out = M S_in + B of each segment that another one follows: b fp32 [segments, HV, K, V], m fp32
    [segments, HV, K, K], live int32 [segments, HV]. Without a segment before it b is the state that leaves,
    walked from the initial one. Where the decay of a segment is below e^least, M counts as 0: live is 0, m is
    0, and b may be walked over the last chunks alone. That decay is the product over its chunks of their
    slowest channels', e^-5 at least for each. Rows that nobody needs are undefined.
``adj_transfer(do, beta, prep, seqs, live, *, dht=None, least=None) -> b``
    The B of R_in = M^T R_out + B, of each segment with one before it; alike.
``chain(b, m, live, prep, seqs, *, adjoint=False) -> states``
    What `scan` takes as ``entering``, or of the adjoint maps what `adj` takes as ``leaving``.
``merge(b, m, chains, n_out, *, live=None, transposed=False, columns=None, out=None) -> states``
    See `cake.core.state_chain`.

``out(q, k, v, g, gate, do, y, beta, prep, states, adj_states, seqs, *, scale, l2norm, states_edge, adj_edge,
into=None) -> (dq, dk, dv, dbeta, dg, partials | None)``
    The parallel rest of the backward; dq, dk, dv bf16, dbeta fp32, dg in g's dtype and with respect to g as
    it was given. dv may take over y's storage. `y` of `adj` and `into` = (dq, dk, dv, dbeta, dg) say where
    results go: rows of dq, dk, dv and dg like those of inputs, dbeta fp32 or bf16 of any strides. The kernels
    take dv alone for y. With a gate, `partials` fp32 [chunks, HV, 129] holds each
    chunk's share of the gradients of A_log (column 0) and of dt_bias.
``reduce(partials) -> (da_log, dbias)``
    Their sums over chunks in a fixed order, fp32 [HV] and [HV, 128].

Where a backend says `SELECTIONS`, as the torch twins do, `seqs` may also be a selection of the call's
sequences (`Sequences.select`): the walks and `out` then write its tokens alone, into `o`, `y` and `into`, and
number their tapes by the selection, and `transfer` and `adj_transfer` find the maps of each sequence; `prep`
is always the whole call's.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Gate(NamedTuple):
    """How the raw gate becomes the log decay; x = raw + bias, no decay below e^-88.

    Without a bound ``-exp(a_log) softplus(x)``, with one ``lower_bound sigmoid(exp(a_log) x)``.

    a_log: fp32 or bf16 [HV]; None, with a bound alone, counts as 0.
    bias: fp32 or bf16 [HV, 128]; None counts as 0.
    """

    a_log: torch.Tensor | None
    bias: torch.Tensor | None
    lower_bound: float | None


class Prep(NamedTuple):
    """What `prep` makes of a call. With b the inclusive sum over the chunk of log2(e) max(log decay, -88):

    qg, kg, kr: bf16 [HV, total, 128]. scale q^ 2^b, k^ 2^b and k^ 2^(b_C - b), b_C of the chunk's last token.
    p: bf16 [HV, total, 64]. Row i of a chunk's P_ij = scale sum_c q^_ic k^_jc 2^(b_ic - b_jc) for i >= j;
       columns past the chunk's tokens are 0.
    t: bf16 [HV, total, 64]. Row i of its T = (I + L)^-1, L_ij = beta_i sum_c k^_ic k^_jc 2^(b_ic - b_jc) for
       i > j; columns past the chunk's tokens are 0.
    last: fp32 [chunks, HV, 128]. 2^(b_C).
    rq, rk: fp32 [H, total]. 1 / sqrt(sum q^2 + 1e-6) of each row, or 1 without the L2 norm.
    plan: the CUDA backend's tables of sequences and chunks, int32; None elsewhere.

    The CUDA backend holds qg to t chunk by chunk, [chunks, HV, 64, 128 or 64], as images of tiles.
    """

    qg: torch.Tensor
    kg: torch.Tensor
    kr: torch.Tensor
    p: torch.Tensor
    t: torch.Tensor
    last: torch.Tensor
    rq: torch.Tensor
    rk: torch.Tensor
    plan: torch.Tensor | None = None


def backend_name(device: torch.device, requested: str | None) -> str:
    """What runs the stages for tensors on `device`: "torch" or "cuda".

    Raises:
        ValueError: `requested` is no backend.
        NotImplementedError: no backend serves the device unless it is requested; the message says how.
    """
    if requested not in (None, "torch"):
        raise ValueError(f"backend must be 'torch' or None, got {requested!r}")
    if requested == "torch" or device.type == "cpu":
        return "torch"
    reference = "backend='torch' runs the reference backend on any device, far slower"
    if device.type != "cuda":
        raise NotImplementedError(f"cake.kda runs on CPU and CUDA tensors, got device {device}; {reference}")
    index: Any = device.index
    capability = _capability(torch.cuda.current_device() if index is None else index)
    if capability != (9, 0):
        raise NotImplementedError(
            f"cake.kda has CUDA kernels for sm_90 alone, got sm_{capability[0]}{capability[1]} ({device}); "
            f"{reference}"
        )
    return "cuda"


@lru_cache(maxsize=8)
def stages(backend: str) -> ModuleType:
    """The module with the stage functions of a backend, "torch" or "cuda"."""
    return import_module(f"cake.kda._{backend}")


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
