"""What the NVIDIA driver says about this machine's GPUs, asked without torch.

For the command only: asking initialises the driver in this process, after which a forked child can't use a
GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["Driver", "Gpu", "query"]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


@dataclass(frozen=True)
class Gpu:
    """One device: its name, compute capability and memory in bytes."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True)
class Driver:
    """The CUDA release that the driver serves, its devices, and what went wrong (None: nothing did)."""

    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    error: str | None


def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


def query() -> Driver:
    """Ask libcuda. Never raises: a machine without a driver has no CUDA release and no devices."""
    try:
        cuda = _load("libcuda.so.1")
    except OSError:
        return Driver(None, (), "no NVIDIA driver (libcuda.so.1 can't be loaded)")
    number = ctypes.c_int()
    served = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        served = (number.value // 1000, number.value % 1000 // 10)
    status = cuda.cuInit(0)
    if status != 0:
        return Driver(served, (), _explain(status))
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return Driver(served, (), "the driver doesn't tell how many GPUs there are")
    return Driver(served, tuple(_device(cuda, i) for i in range(count.value)), None)


def _explain(status: int) -> str:
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        return "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty, or the container started without one?)"
    if status in (803, 804):  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        return f"libcuda and the kernel driver don't fit together (cuInit returned {status})"
    return f"the driver can't be initialised (cuInit returned {status})"


def _device(cuda: ctypes.CDLL, index: int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), index)
    values = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        values.append(value.value)
    total = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), index)
    return Gpu(name.value.decode(errors="replace"), (values[0], values[1]), total.value)
