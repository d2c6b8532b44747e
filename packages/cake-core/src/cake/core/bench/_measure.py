"""Measuring one pass of several contenders, in turn."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cake.core import config
from cake.core.bench import _passes
from cake.core.bench._meter import Meter
from cake.core.bench._model import Arm, Call, Inputs, Pass


@dataclass
class Contender:
    """One arm in one mode, and what is known of it for the shape at hand."""

    arm: Arm
    mode: str | None
    call: Call
    #: Bytes that its forward keeps for its backward.
    saved_bytes: int = 0

    def __str__(self) -> str:
        return self.arm.name if self.mode is None else f"{self.arm.name} ({self.mode})"

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """Within this context the process is configured as the arm wants it."""
        if self.arm.configuration is None:
            yield
        else:
            with config.temporary(**self.arm.configuration(self.mode)):
                yield


@dataclass
class Measurement:
    """One contender's figures for one pass."""

    contender: Contender
    walls: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    #: Of samples of their own, with autograd's engine in the calling thread.
    hosts_in_one_thread: list[float] = field(default_factory=list)
    #: The same, the contender's calls one behind another.
    hosts_in_a_row: list[float] = field(default_factory=list)
    #: One list of (name, ms) per profiled run.
    profiles: list[list[tuple[str, float]]] = field(default_factory=list)
    peak_bytes: int | None = None
    #: Why the contender has no times.
    error: Exception | None = None
    #: Why it has times and nothing else: the profiler's or the allocator's trouble.
    unprofiled: Exception | None = None

    @property
    def wall_ms(self) -> float:
        """Median."""
        return statistics.median(self.walls)

    @property
    def host_us(self) -> float | None:
        """Median; None where device and host are one."""
        return statistics.median(self.hosts) if self.hosts else None

    @property
    def host_one_thread_us(self) -> float | None:
        """Median; None for a forward, and where device and host are one."""
        return statistics.median(self.hosts_in_one_thread) if self.hosts_in_one_thread else None

    @property
    def host_in_a_row_us(self) -> float | None:
        """Median; None where device and host are one."""
        return statistics.median(self.hosts_in_a_row) if self.hosts_in_a_row else None

    @property
    def gpu_ms(self) -> float | None:
        """Median of the runs' sums; None where nothing was profiled."""
        return statistics.median(sum(ms for _, ms in run) for run in self.profiles) if self.profiles else None

    def by_kernel(self) -> list[tuple[str, int, float]]:
        """(name, calls in a run, median of the runs' sums in ms), the largest first."""
        names = {name for run in self.profiles for name, _ in run}
        rows = []
        for name in names:
            sums = [sum(ms for n, ms in run if n == name) for run in self.profiles]
            calls = statistics.median_high(sum(n == name for n, _ in run) for run in self.profiles)
            rows.append((name, int(calls), statistics.median(sums)))
        return sorted(rows, key=lambda row: (-row[2], row[0]))


def measure(
    which: Pass,
    inputs: Inputs,
    contenders: Sequence[Contender],
    meter: Meter,
    *,
    warmups: int,
    samples: int,
    profiles: int,
) -> list[Measurement]:
    """Time the contenders in turn, one sample each per round, then profile each.

    Turn by turn, whatever slowly changes the machine (clocks, heat, a neighbour) meets all of them alike, and
    in another order each round, so that none always finds the caches of the host as the same other left them.
    A contender that raises is left out from then on, with its error in the measurement.
    """
    measurements = [Measurement(contender) for contender in contenders]
    plans = [_passes.plan(contender.call, inputs, which) for contender in contenders]
    turns = list(zip(measurements, plans, strict=True))
    order = random.Random(0)  # the same one on every rank
    with _without_garbage_collection():
        for index in range(warmups + samples):
            for measurement, (prepare, run) in order.sample(turns, len(turns)):
                with _attempt(measurement) as wanted:
                    if not wanted:
                        continue
                    wall, host = meter.sample(prepare, run)
                    if index >= warmups:
                        measurement.walls.append(wall)
                        measurement.hosts += [] if host is None else [host]
        if which in ("bwd", "fwd+bwd"):
            _in_one_thread(turns, order, meter, samples)
        _in_a_row(turns, meter, samples)
        for measurement, (prepare, run) in turns:
            if measurement.error is None:
                _profile(measurement, prepare, run, meter, profiles)
    return measurements


def _in_one_thread(
    turns: Sequence[tuple[Measurement, tuple[Callable[[], Any], Callable[[Any], Any]]]],
    order: random.Random,
    meter: Meter,
    samples: int,
) -> None:
    """The host's time of a backward without waking autograd's thread of the device and being woken by it.

    Each contender has been warmed up, and the walls are known: these samples give no more than their hosts.
    """
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(samples):
            for measurement, (prepare, run) in order.sample(turns, len(turns)):
                if measurement.hosts:  # else device and host are one
                    with _attempt(measurement) as wanted:
                        host = meter.sample(prepare, run)[1] if wanted else None
                        measurement.hosts_in_one_thread += [] if host is None else [host]


def _in_a_row(
    turns: Sequence[tuple[Measurement, tuple[Callable[[], Any], Callable[[Any], Any]]]],
    meter: Meter,
    samples: int,
) -> None:
    """The host's time where its caches hold a call's own code: what the call itself takes, in one thread."""
    with torch.autograd.set_multithreading_enabled(False):
        for measurement, (prepare, run) in turns:
            if measurement.hosts:
                with _attempt(measurement) as wanted:
                    hosts = [meter.sample(prepare, run)[1] for _ in range(samples + 1)] if wanted else []
                    measurement.hosts_in_a_row = [host for host in hosts[1:] if host is not None]


def _profile(
    measurement: Measurement,
    prepare: Callable[[], Any],
    run: Callable[[Any], Any],
    meter: Meter,
    profiles: int,
) -> None:
    try:
        with measurement.contender.configured():
            measurement.peak_bytes = meter.peak_bytes(prepare, run)
            for _ in range(profiles):
                found = meter.kernels(prepare, run)
                measurement.profiles += [] if found is None else [found]
    except Exception as error:
        measurement.unprofiled = error
        measurement.profiles.clear()


@contextlib.contextmanager
def _attempt(measurement: Measurement) -> Iterator[bool]:
    """Yield whether to go on with a contender, configured for it; keep the error that it raises."""
    if measurement.error is not None:
        yield False
        return
    try:
        with measurement.contender.configured():
            yield True
    except Exception as error:
        measurement.error = error


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
