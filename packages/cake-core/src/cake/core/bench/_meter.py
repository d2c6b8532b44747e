"""How one pass is measured: on a GPU with events, the profiler and the allocator, on a CPU with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 * 1024 * 1024


class Meter(Protocol):
    """``prepare`` makes what ``run`` needs, unmeasured; what ``run`` returns is dropped unmeasured too."""

    def sample(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[float, float | None]:
        """One run: wall time in ms, and the host's part in us (None where device and host are one)."""

    def kernels(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> list[tuple[str, float]] | None:
        """Device activities of one run in the order of their starts, with their ms; None without a device."""

    def peak_bytes(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> int | None:
        """Most device memory in use during ``run`` above what was in use before ``prepare``; None without."""

    def synchronize(self) -> None:
        """Wait for the device."""


def _at_once() -> None:
    """Nothing to wait for."""


class CpuMeter:
    """Wall time alone.

    Args:
        align: called before the clock starts.
    """

    def __init__(self, align: Callable[[], None] = _at_once) -> None:
        self._align = align

    def sample(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[float, float | None]:
        """See ``Meter``."""
        state = prepare()
        self._align()
        start = time.perf_counter()
        run(state)
        return 1e3 * (time.perf_counter() - start), None

    def kernels(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> list[tuple[str, float]] | None:
        """None."""
        return None

    def peak_bytes(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> int | None:
        """None."""
        return None

    def synchronize(self) -> None:
        """Nothing."""


class CudaMeter:
    """Every sample starts with a flushed L2 cache and an idle device.

    Wall time lies between two events on the current stream around the call, so it holds the host's time
    before the first kernel and wherever the device waits for the host; the host's part is how long the call
    itself took to return.

    Args:
        device: the GPU.
        align: called on the idle device, before the clock starts.
    """

    def __init__(self, device: torch.device, align: Callable[[], None] = _at_once) -> None:
        self._device = device
        self._align = align
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start = _event()
        self._end = _event()
        self._profiler_is_ready = False

    def sample(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[float, float | None]:
        """See ``Meter``."""
        state = prepare()
        self._flush_cache()
        self._align()
        self._start.record()
        before = time.perf_counter()
        result = run(state)
        host = time.perf_counter() - before
        self._end.record()
        self.synchronize()
        del result
        return float(self._start.elapsed_time(self._end)), 1e6 * host

    def kernels(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> list[tuple[str, float]] | None:
        """See ``Meter``. The flush lies before the profiled region, so whatever is found is the run's own."""
        from torch.profiler import ProfilerActivity, profile

        if not self._profiler_is_ready:
            # The first region of a process starts the tracing of the device and may miss activities.
            with profile(activities=[ProfilerActivity.CUDA]):
                self._flush_cache()
            self._profiler_is_ready = True
        state = prepare()
        self._flush_cache()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._align()
            result = run(state)
            self.synchronize()
        del result
        return device_activities(profiler.events() or ())

    def peak_bytes(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> int | None:
        """See ``Meter``."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self._device)
        state = prepare()
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run(state)
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self._device)
        del result
        return peak - before

    def synchronize(self) -> None:
        """See ``Meter``."""
        torch.cuda.synchronize(self._device)

    def _flush_cache(self) -> None:
        self._flush.fill_(1)
        self.synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # PyTorch's has no types


def device_activities(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Name and ms of every kernel, copy and memset among a profiler's events, by start.

    Ranges that a program marks also appear on the device's timeline; they would count their kernels twice.
    """
    found = [
        (event.time_range.start, event.name, event.time_range.elapsed_us() / 1e3)
        for event in events
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and getattr(event, "activity_type", None) not in ("gpu_user_annotation", "overhead")
    ]
    return [(name, ms) for _, name, ms in sorted(found, key=lambda entry: entry[0])]


def meter(device: torch.device, align: Callable[[], None] = _at_once) -> Meter:
    """The meter of a device; see `CudaMeter`."""
    return CudaMeter(device, align) if device.type == "cuda" else CpuMeter(align)
