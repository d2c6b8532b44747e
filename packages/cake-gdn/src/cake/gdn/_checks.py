"""Checks of a call's arguments by their metadata: errors name argument, what is expected and what came."""

from __future__ import annotations

import torch

from cake.core.checks import check_tensor
from cake.core.launch import ALIGNMENT, is_aligned
from cake.gdn.plan import HEAD_DIM

__all__ = ["check_alignment", "check_gate", "check_inputs", "check_state"]

GATE_DTYPES = (torch.float32, torch.bfloat16)


def check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> None:
    """Shapes, dtypes, devices and strides."""
    check_tensor(
        "q",
        q,
        shape={"B": None, "T": None, "H": None, "K": HEAD_DIM},
        dtypes=torch.bfloat16,
        last_contiguous=True,
    )
    batch, tokens, heads, _ = q.shape
    device = q.device
    if batch < 1 or heads < 1:
        raise ValueError(f"q must have a row and a head, got [B, T, H, K]={list(q.shape)}")
    check_tensor(
        "k",
        k,
        shape={"B": batch, "T": tokens, "H": heads, "K": HEAD_DIM},
        dtypes=torch.bfloat16,
        device=device,
        last_contiguous=True,
    )
    check_tensor(
        "v",
        v,
        shape={"B": batch, "T": tokens, "HV": None, "V": HEAD_DIM},
        dtypes=torch.bfloat16,
        device=device,
        last_contiguous=True,
    )
    v_heads = v.shape[2]
    if v_heads < 1 or v_heads % heads:
        raise ValueError(f"v must have a multiple of H={heads} heads, got HV={v_heads}")
    gate_shape = {"B": batch, "T": tokens, "HV": v_heads}
    check_tensor("g", g, shape=gate_shape, dtypes=GATE_DTYPES, device=device)
    check_tensor("beta", beta, shape=gate_shape, dtypes=GATE_DTYPES, device=device)


def check_alignment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Whether a GPU can load them as they lie."""
    if q.device.type == "cuda" and q.shape[1]:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not is_aligned(x):
                raise ValueError(
                    f"{name} must have its address and strides at multiples of {ALIGNMENT} bytes, "
                    f"got address {x.data_ptr():#x} and strides {tuple(x.stride())} of 2 bytes"
                )


def check_state(
    state: torch.Tensor, n: int, v_heads: int, device: torch.device, axes: tuple[str, str] = ("K", "V")
) -> None:
    """The initial state of `n` sequences."""
    shape = {"N": n, "HV": v_heads, axes[0]: HEAD_DIM, axes[1]: HEAD_DIM}
    check_tensor("initial_state", state, shape=shape, dtypes=torch.float32, device=device)


def check_gate(
    use_gate: bool,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    v_heads: int,
    device: torch.device,
) -> None:
    """The parameters of the gate in the kernel."""
    for name, x in (("A_log", a_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not use_gate:
            raise ValueError(f"{name} is used by use_gate_in_kernel=True alone, got use_gate_in_kernel=False")
        check_tensor(name, x, shape={"HV": v_heads}, dtypes=GATE_DTYPES, device=device)
    if use_gate and a_log is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
