"""Checks of a call's arguments by their metadata: errors name argument, what is expected and what came."""

from __future__ import annotations

import torch

from cake.core import sequences
from cake.core.checks import check_number, check_tensor
from cake.core.launch import ALIGNMENT, is_aligned

__all__ = [
    "HEAD_DIM",
    "check_alignment",
    "check_bound",
    "check_gate",
    "check_inputs",
    "check_readable",
    "check_state",
    "check_tape",
]

HEAD_DIM = 128
SAFE_BOUND = -5.0
GATE_DTYPES = (torch.float32, torch.bfloat16)


def check_bound(lower_bound: float | None, use_gate: bool, safe_gate: bool) -> float | None:
    """The lower bound as a float."""
    if lower_bound is None:
        if use_gate and safe_gate:
            raise ValueError("safe_gate=True needs a lower_bound with use_gate_in_kernel=True, got None")
        return None
    bound = check_number("lower_bound", lower_bound)
    if bound >= 0:
        raise ValueError(f"lower_bound must be below 0, got {lower_bound}")
    if safe_gate and bound < SAFE_BOUND:
        raise ValueError(f"lower_bound must be in [{SAFE_BOUND:g}, 0) with safe_gate=True, got {lower_bound}")
    return bound


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    """Shapes, dtypes, devices and strides."""
    bf16 = torch.bfloat16
    free: dict[str, int | None] = {"B": None, "T": None, "H": None, "K": HEAD_DIM}
    check_tensor("q", q, shape=free, dtypes=bf16, last_contiguous=True)
    batch, tokens, heads, _ = q.shape
    device = q.device
    if batch < 1 or heads < 1:
        raise ValueError(f"q must have a row and a head, got [B, T, H, K]={list(q.shape)}")
    row: dict[str, int | None] = {"B": batch, "T": tokens}
    check_tensor(
        "k", k, shape={**row, "H": heads, "K": HEAD_DIM}, dtypes=bf16, device=device, last_contiguous=True
    )
    check_tensor(
        "v", v, shape={**row, "HV": None, "V": HEAD_DIM}, dtypes=bf16, device=device, last_contiguous=True
    )
    v_heads = v.shape[2]
    if v_heads < 1 or v_heads % heads:
        raise ValueError(f"v must have a multiple of H={heads} heads, got HV={v_heads}")
    row["HV"] = v_heads
    check_tensor(
        "g", g, shape={**row, "K": HEAD_DIM}, dtypes=GATE_DTYPES, device=device, last_contiguous=True
    )
    check_tensor("beta", beta, shape=row, dtypes=GATE_DTYPES, device=device)


def check_alignment(*tensors: tuple[str, torch.Tensor]) -> None:
    """Whether a GPU can load them as they lie."""
    for name, x in tensors:
        if x.device.type == "cuda" and x.shape[1] and not is_aligned(x):
            raise ValueError(
                f"{name} must have its address and strides at multiples of {ALIGNMENT} bytes, "
                f"got address {x.data_ptr():#x}, strides {tuple(x.stride())} of {x.element_size()} bytes"
            )


def check_state(
    state: torch.Tensor, n: int, v_heads: int, device: torch.device, axes: tuple[str, str] = ("K", "V")
) -> None:
    """The initial state of `n` sequences."""
    shape = {"N": n, "HV": v_heads, axes[0]: HEAD_DIM, axes[1]: HEAD_DIM}
    check_tensor("initial_state", state, shape=shape, dtypes=torch.float32, device=device)


def check_readable(seqs: sequences.Sequences, backend: str) -> None:
    """Boundaries that the backend can use."""
    if seqs.boundaries is None and backend == "torch":
        raise ValueError(
            f"cu_seqlens must be on the CPU, or given as cu_seqlens_cpu, for the backend {backend!r}, "
            "which reads it on the host; got one on a GPU"
        )


def check_gate(
    use_gate: bool,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    v_heads: int,
    device: torch.device,
) -> torch.Tensor | None:
    """The bias as [HV, K]."""
    for name, x in (("A_log", a_log), ("dt_bias", dt_bias)):
        if x is not None and not use_gate:
            raise ValueError(f"{name} is used by use_gate_in_kernel=True alone, got use_gate_in_kernel=False")
    if a_log is not None:
        check_tensor("A_log", a_log, shape={"HV": v_heads}, dtypes=GATE_DTYPES, device=device)
    elif use_gate and lower_bound is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True and no lower_bound, got None")
    if dt_bias is None:
        return None
    if getattr(dt_bias, "ndim", 1) == 2:
        shape = {"HV": v_heads, "K": HEAD_DIM}
    else:
        shape = {"HV * K": v_heads * HEAD_DIM}
    check_tensor("dt_bias", dt_bias, shape=shape, dtypes=GATE_DTYPES, device=device)
    return dt_bias.reshape(v_heads, HEAD_DIM)


def check_tape(disable_recompute: bool, recompute_state: bool | None) -> None:
    """What a forward is asked to keep."""
    if disable_recompute and recompute_state:
        raise ValueError("disable_recompute=True and recompute_state=True contradict each other")
