"""Scratch memory for one call of an op, kept between calls when the user allows it.

This module owns the process's pools: one per device and stream, each bounded by
``--cake-workspace-pool-bytes``. Nothing here imports torch before the first ``take``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from . import config

if TYPE_CHECKING:
    import torch

__all__ = ["Stats", "pooled", "release", "stats", "take"]

_log = logging.getLogger("cake")


def take(
    op: str, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """An uninitialised contiguous tensor for use on the current stream of ``device``.

    At the default bound of 0 bytes this is ``torch.empty``. With a bound, the stream's pool keeps one buffer
    for each ``(op, role)`` and hands out tensors that lie in it:

    - A buffer is handed out only while no other tensor lies in it: neither the tensor of an earlier ``take``,
      nor a view of one, nor one that autograd saved, in whatever thread. While one does, a ``take`` of the
      same key is a plain ``torch.empty``. Dropping the last reference is how a tensor is given back.
    - The tensor belongs to the stream that was current when it was taken. Work queued there before it was
      given back runs before work queued there afterwards, so a kernel that still runs is no hazard on that
      stream. Whoever uses the tensor on a second stream orders both streams before giving it back.
    - The contents are whatever the last holder left: a result must never depend on them.
    - The least recently used buffers are forgotten so that a pool stays within the bound. A request above the
      bound, one without elements, and any during the capture of a CUDA graph go past the pool.

    Args:
        op: The op's name.
        role: What the buffer is for, in words of the op's own; unlike roles never share memory.
        shape: Of the tensor.
        dtype: Of the tensor.
        device: Where; ``"cuda"`` is the current GPU.

    Returns:
        The tensor. It requires no gradient. Its address is at least as aligned as ``torch.empty``'s.
    """
    return POOLS.take(op, role, shape, dtype, device)


def pooled() -> bool:
    """Whether ``take`` is more than ``torch.empty``."""
    return config.pool_bytes() > 0 or bool(POOLS._pools)


def release() -> int:
    """Forget every buffer of every pool, and return how many bytes they were.

    Memory that no tensor lies in goes back to PyTorch's allocator at once; a buffer in use goes back when its
    last tensor dies.
    """
    return POOLS.release()


def stats() -> Stats:
    """What the pools hold and have done since the process began."""
    return POOLS.stats()


@dataclass(frozen=True)
class Stats:
    """Counts over all pools of the process. While the bound is 0, ``take`` counts nothing."""

    #: Bytes that ``release()`` would return now.
    bytes_held: int = 0
    #: Buffers held.
    buffers: int = 0
    #: Pools (one per device and stream) that hold one.
    pools: int = 0
    #: Takes served from a buffer that was there.
    hits: int = 0
    #: Takes that made a buffer, or a larger one in the old one's place.
    misses: int = 0
    #: Takes past the pool: larger than the bound, without elements, or while a CUDA graph was captured.
    bypasses: int = 0
    #: Takes past the pool because the buffer was in use.
    busy: int = 0
    #: Buffers forgotten to stay within the bound.
    evictions: int = 0


class Devices(Protocol):
    """Everything the pools ask of PyTorch and of the GPU."""

    def resolve(self, device: torch.device | str) -> torch.device:
        """The device, with an index if it is a GPU."""

    def stream(self, device: torch.device) -> int:
        """The handle of the current stream; 0 where a device has none."""

    def capturing(self, device: torch.device) -> bool:
        """Whether the current stream captures a graph."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """``torch.empty``."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage | None:
        """Memory on the current stream; None where tensors are not plain ones with memory of their own."""

    def holders(self, memory: torch.UntypedStorage) -> int | None:
        """How many references the memory has; None where PyTorch doesn't say."""

    def tensor(
        self, memory: torch.UntypedStorage, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor at the start of the memory, with a version counter of its own."""


class _TorchDevices:
    def resolve(self, device: torch.device | str) -> torch.device:
        import torch

        found = torch.device(device)
        # Torch's own types say that an index is always there; that of torch.device("cuda") is None.
        return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found

    def stream(self, device: torch.device) -> int:
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

    def capturing(self, device: torch.device) -> bool:
        import torch

        if device.type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=device)

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage | None:
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        plain = type(made) is torch.Tensor and device.type != "meta"
        return made.untyped_storage() if plain else None

    def holders(self, memory: torch.UntypedStorage) -> int | None:
        import torch

        count = getattr(torch._C, "_storage_Use_Count", None)
        return None if count is None else int(count(memory._cdata))

    def tensor(
        self, memory: torch.UntypedStorage, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        import torch

        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        made = torch.empty(0, dtype=dtype, device=device)
        return made.set_(memory, 0, tuple(shape), tuple(reversed(strides[: len(shape)])))


@dataclass
class _Buffer:
    memory: torch.UntypedStorage
    nbytes: int
    #: References to the memory while nobody but the pool uses it.
    idle_holders: int


@dataclass
class _Pool:
    """The buffers of one device and stream, least recently used first."""

    buffers: OrderedDict[tuple[str, str], _Buffer] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def forget(self, key: tuple[str, str]) -> None:
        self.nbytes -= self.buffers.pop(key).nbytes

    def shrink(self, bound: int) -> int:
        """Forget the least recently used buffers until the rest fit, and return how many."""
        before = len(self.buffers)
        while self.nbytes > bound:
            self.forget(next(iter(self.buffers)))
        return before - len(self.buffers)


class Pools:
    """The pools of one process. ``bound`` returns the bytes that each may keep, at the time of the call."""

    def __init__(self, devices: Devices, bound: Callable[[], int]) -> None:
        self._devices = devices
        self._bound = bound
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, int | None, int], _Pool] = {}
        self._last_bound = 0
        self._counts = dict.fromkeys(("hits", "misses", "bypasses", "busy", "evictions"), 0)
        self._can_count_holders = True
        #: Called with each tensor that comes out of a used buffer; ``cake.core.testing`` poisons it here.
        self.on_reuse: Callable[[torch.Tensor], object] | None = None

    def take(
        self, op: str, role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """See the module's ``take``."""
        bound = self._bound()
        if bound <= 0:
            if self._pools:
                self.release()
            return self._devices.empty(shape, dtype, device)
        device = self._devices.resolve(device)
        nbytes = math.prod(shape) * dtype.itemsize
        pooled = None
        if 0 < nbytes <= bound and self._can_count_holders and not self._devices.capturing(device):
            pooled = self._take_pooled((op, role), nbytes, shape, dtype, device, bound)
        else:
            with self._lock:
                self._counts["bypasses"] += 1
        return self._devices.empty(shape, dtype, device) if pooled is None else pooled

    def release(self) -> int:
        """See the module's ``release``."""
        with self._lock:
            forgotten, self._pools = self._pools, {}
        return sum(pool.nbytes for pool in forgotten.values())

    def stats(self) -> Stats:
        """See the module's ``stats``."""
        with self._lock:
            held = [pool for pool in self._pools.values() if pool.buffers]
            return Stats(
                bytes_held=sum(pool.nbytes for pool in held),
                buffers=sum(len(pool.buffers) for pool in held),
                pools=len(held),
                **self._counts,
            )

    def _take_pooled(
        self,
        key: tuple[str, str],
        nbytes: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        bound: int,
    ) -> torch.Tensor | None:
        place = (device.type, device.index, self._devices.stream(device))
        # The lock is held from the look at the holders until the new tensor is one of them, so that no two
        # threads can find one buffer idle.
        with self._lock:
            self._follow(bound)
            pool = self._pools.setdefault(place, _Pool())
            buffer = pool.buffers.get(key)
            if buffer is not None and self._devices.holders(buffer.memory) != buffer.idle_holders:
                self._counts["busy"] += 1
                return None
            reused = buffer is not None and buffer.nbytes >= nbytes
            if buffer is None or not reused:
                buffer = None  # lets go of the memory that is too small before the larger one is allocated
                buffer = self._replace(pool, key, nbytes, device, bound)
                if buffer is None:
                    self._counts["bypasses"] += 1
                    return None
            pool.buffers.move_to_end(key)
            self._counts["hits" if reused else "misses"] += 1
            tensor = self._devices.tensor(buffer.memory, shape, dtype, device)
        if reused and self.on_reuse is not None:
            self.on_reuse(tensor)
        return tensor

    def _follow(self, bound: int) -> None:
        """Bring every pool within a bound that was lowered."""
        if bound < self._last_bound:
            for pool in self._pools.values():
                self._counts["evictions"] += pool.shrink(bound)
        self._last_bound = bound

    def _replace(
        self, pool: _Pool, key: tuple[str, str], nbytes: int, device: torch.device, bound: int
    ) -> _Buffer | None:
        """Make the buffer of a key; the old one goes first, then others, then the new one is allocated."""
        if key in pool.buffers:
            pool.forget(key)
        self._counts["evictions"] += pool.shrink(bound - nbytes)
        memory = self._devices.allocate(nbytes, device)
        if memory is None:
            return None
        holders = self._devices.holders(memory)
        if holders is None:
            self._can_count_holders = False
            _log.warning("this PyTorch doesn't count the users of a storage: the workspace pool stays empty")
            return None
        buffer = pool.buffers[key] = _Buffer(memory, nbytes, holders)
        pool.nbytes += nbytes
        return buffer


#: The pools behind this module's functions.
POOLS = Pools(_TorchDevices(), lambda: config.pool_bytes())
