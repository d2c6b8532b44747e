"""The option --device of commands that run an op."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["device_of"]


def device_of(name: str | None) -> torch.device:
    """The device of that name, which becomes the current one; by default the GPU if there is one.

    Raises:
        ValueError: no CPU or CUDA GPU, or one that isn't there.
    """
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # torch's own words list devices that nothing here runs on
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be a CPU or a CUDA GPU, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {name}: there is no CUDA GPU")
        device, count = torch.device("cuda", device.index or 0), torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"--device {name}: there are {count} CUDA GPUs, numbered from 0")
        torch.cuda.set_device(device)
    return device
