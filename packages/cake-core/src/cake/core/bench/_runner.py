"""The run: every arm of a shape is loaded, checked against another and then timed in turn with the others."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cake.core.bench import _passes
from cake.core.bench._measure import Contender, Measurement, measure
from cake.core.bench._meter import Meter
from cake.core.bench._model import PASSES, Arm, Bench, Call, Ceilings, Inputs, Pass, Shape
from cake.core.testing import relative_error

_log = logging.getLogger("cake")


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    shapes: tuple[Shape, ...]
    arms: tuple[Arm, ...]
    passes: tuple[Pass, ...] = PASSES
    #: Timed samples per pass, and untimed ones before them.
    samples: int = 15
    warmups: int = 5
    #: Runs under the profiler per pass; 0 leaves ``gpu_ms`` out.
    profiles: int = 3
    seed: int = 0
    #: Seconds after which nothing new is begun; None has no end.
    time_budget: float | None = None

    @property
    def entries(self) -> list[tuple[Arm, str | None]]:
        """Every arm in every one of its modes."""
        return [(arm, mode) for arm in self.arms for mode in arm.modes]

    @property
    def steps(self) -> int:
        """How many steps a complete run reports: for each shape a check per arm and mode, and each pass."""
        return len(self.shapes) * (len(self.entries) + len(self.passes))


@dataclass
class Results:
    """What was found. ``rows``, ``kernels`` and ``checks`` are ready for JSON."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    #: Device time by kernel name: op, shape, pass, arm, mode, name, calls, gpu_ms. Of the op's own, where the
    #: work is known, also bytes and flops of a launch and its part of the copy's and the matmul's rate.
    kernels: list[dict[str, Any]] = field(default_factory=list)
    #: Errors between arms: op, shape, arm, mode, against, errors by tensor, limit, passed.
    checks: list[dict[str, Any]] = field(default_factory=list)
    #: Whatever was not measured, and why.
    notes: list[str] = field(default_factory=list)
    #: Whether something of cake's own did not work, or two arms disagreed.
    failed: bool = False


class Runner:
    """Runs a plan and fills ``results``, shape by shape.

    Args:
        bench: The op's part.
        plan: What to measure.
        device: Where.
        meter: How.
        ceilings: What the device can do, for the rows of the arm "floor"; None leaves them out.
        on_step: Called before each step with a line that says what runs now.
        on_shape: Called with the results so far when a shape is done.
        clock: Seconds, for the time budget.
    """

    def __init__(
        self,
        bench: Bench,
        plan: Plan,
        device: torch.device,
        meter: Meter,
        *,
        ceilings: Ceilings | None = None,
        on_step: Callable[[str], object] = lambda line: None,
        on_shape: Callable[[Results], object] = lambda results: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results = Results()
        self._bench = bench
        self._plan = plan
        self._device = device
        self._meter = meter
        self._ceilings = ceilings
        self._on_step = on_step
        self._on_shape = on_shape
        self._clock = clock
        self._start = clock()

    def run(self) -> Results:
        """Measure everything that the time budget allows."""
        calls = self._load()
        for shape in self._plan.shapes:
            if self._spent():
                self._note(f"{shape.name}: not run, the time budget is spent")
                continue
            try:
                self._run_shape(shape, calls)
                gc.collect()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
            except Exception as error:
                # No arm's own: the inputs or the reference, or a GPU that an arm has left broken.
                _log.debug("%s", shape.name, exc_info=error)
                self._note(f"{shape.name}: {describe(error)}")
                self.results.failed = True
            self._on_shape(self.results)
        return self.results

    def _load(self) -> dict[str, Call]:
        calls = {}
        for arm in self._plan.arms:
            try:
                calls[arm.name] = arm.load()
            except Exception as error:
                self._give_up(arm, f"{arm.name}: can't be loaded", error)
        return calls

    def _run_shape(self, shape: Shape, calls: Mapping[str, Call]) -> None:
        inputs = self._bench.inputs(shape, self._device, self._plan.seed)
        contenders = self._checked(shape, inputs, calls)
        for which in self._plan.passes:
            self._on_step(f"{shape.name}: {which}")
            if self._spent():
                self._note(f"{shape.name}, {which}: not run, the time budget is spent")
                continue
            # Without a tape there is nothing that a mode could change: the first one stands for all.
            entered = [
                c
                for c in contenders
                if (c.mode == c.arm.modes[0] if which == "fwd" else not c.arm.forward_only)
            ]
            measurements = measure(
                which,
                inputs,
                entered,
                self._meter,
                warmups=self._plan.warmups,
                samples=self._plan.samples,
                profiles=self._plan.profiles,
            )
            for measurement in measurements:
                contender = measurement.contender
                if measurement.error is not None:
                    self._give_up(contender.arm, f"{shape.name}, {which}: {contender}", measurement.error)
                    contenders.remove(contender)
                    continue
                if measurement.unprofiled is not None:
                    why = describe(measurement.unprofiled)
                    self._note(f"{shape.name}, {which}: {contender} could not be profiled: {why}")
                name = contender.arm.name
                record(self.results, self._bench, shape, which, name, measurement, self._ceilings)
        if self._ceilings is not None and self._bench.work is not None:
            self.results.rows += floor_rows(self._bench, shape, self._plan, self._ceilings)

    def _checked(self, shape: Shape, inputs: Inputs, calls: Mapping[str, Call]) -> list[Contender]:
        """The contenders whose results agree with the reference where there is one, else with the first's."""
        passed: list[Contender] = []
        against, truth = self._truth(shape, inputs)
        compared = False
        for arm, mode in self._plan.entries:
            self._on_step(f"{shape.name}: check {arm.name}")
            if arm.name not in calls:
                continue
            contender = Contender(arm, mode, calls[arm.name])
            if self._spent():
                self._note(f"{shape.name}, {contender}: not run, the time budget is spent")
                continue
            try:
                with contender.configured():
                    if arm.forward_only:
                        found = _passes.outputs(contender.call, inputs)
                    else:
                        found, contender.saved_bytes = _passes.results(contender.call, inputs)
                self._meter.synchronize()
            except Exception as error:
                self._give_up(arm, f"{shape.name}: {contender}", error)
                continue
            if truth is None:
                against, truth = str(contender), found
            else:
                compared = True
                if not self._agrees(shape, contender, found, against, truth):
                    continue
            passed.append(contender)
        if passed and not compared:
            self._note(f"{shape.name}: {passed[0]} ran alone and was not checked")
        return passed

    def _truth(self, shape: Shape, inputs: Inputs) -> tuple[str, Mapping[str, torch.Tensor] | None]:
        bench = self._bench
        if bench.reference is None or shape.tokens > bench.reference_tokens:
            return "", None
        return "reference", bench.reference(inputs)

    def _agrees(
        self,
        shape: Shape,
        contender: Contender,
        found: Mapping[str, torch.Tensor],
        against: str,
        truth: Mapping[str, torch.Tensor],
    ) -> bool:
        names = [name for name in truth if name in found]
        errors = {name: relative_error(found[name], truth[name]) for name in names}
        missing = sorted(set(found) - set(truth) if contender.arm.forward_only else set(found) ^ set(truth))
        passed = not missing and all(error <= self._bench.limit for error in errors.values())
        self.results.checks.append(
            {
                "op": self._bench.op,
                "shape": shape.name,
                "arm": contender.arm.name,
                "mode": contender.mode,
                "against": against,
                "errors": errors,
                "limit": self._bench.limit,
                "passed": passed,
            }
        )
        if not passed:
            listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            only = f"; only one of them has {', '.join(missing)}" if missing else ""
            self._note(f"{shape.name}: {contender} differs from {against} and is not timed: {listed}{only}")
            self.results.failed = True
        return passed

    def _spent(self) -> bool:
        budget = self._plan.time_budget
        return budget is not None and self._clock() - self._start >= budget

    def _note(self, line: str) -> None:
        _log.info("%s", line)
        self.results.notes.append(line)

    def _give_up(self, arm: Arm, what: str, error: Exception) -> None:
        _log.debug("%s", what, exc_info=error)
        self._note(f"{what}: {describe(error)}")
        self.results.failed |= not arm.peer


def record(
    results: Results,
    bench: Bench,
    shape: Shape,
    which: Pass,
    arm: str,
    measurement: Measurement,
    ceilings: Ceilings | None = None,
    **more: Any,
) -> None:
    """Add the row of a measurement, with `more` fields, and its device time by kernel.

    With `ceilings` also what is known of the work of the op's own kernels.
    """
    op, own = bench.op, not measurement.contender.arm.peer
    contender = measurement.contender
    mode = None if which == "fwd" else contender.mode
    made = row(
        op,
        shape,
        which,
        arm,
        mode,
        gpu_ms=measurement.gpu_ms,
        wall_ms=measurement.wall_ms,
        host_us=measurement.host_us,
        host_one_thread_us=measurement.host_one_thread_us,
        host_in_a_row_us=measurement.host_in_a_row_us,
        peak_bytes=measurement.peak_bytes,
        saved_bytes=None if which == "fwd" else contender.saved_bytes,
    )
    results.rows.append({**made, **more})
    for name, calls, ms in measurement.by_kernel():
        results.kernels.append(
            {
                "op": op,
                "shape": shape.name,
                "pass": which,
                "arm": arm,
                "mode": mode,
                "name": name,
                "calls": calls,
                "gpu_ms": ms,
                **(_work_of(bench, shape, name, calls, ms, ceilings) if own and ceilings is not None else {}),
            }
        )


def _work_of(
    bench: Bench, shape: Shape, name: str, calls: int, ms: float, ceilings: Ceilings
) -> dict[str, float]:
    work = None if bench.kernel_work is None or not ms else bench.kernel_work(shape, name)
    if work is None:
        return {}
    copy, matmul = ceilings.fractions(work, ms / calls)
    return {
        "bytes": work.nbytes,
        "flops": work.flops,
        "of_copy": round(copy, 4),
        "of_matmul": round(matmul, 4),
    }


def row(
    op: str,
    shape: Shape,
    which: Pass,
    arm: str,
    mode: str | None,
    *,
    gpu_ms: float | None = None,
    wall_ms: float | None = None,
    host_us: float | None = None,
    host_one_thread_us: float | None = None,
    host_in_a_row_us: float | None = None,
    peak_bytes: int | None = None,
    saved_bytes: int | None = None,
) -> dict[str, Any]:
    """One row of the results."""
    return {
        "op": op,
        "shape": shape.name,
        "heads": list(shape.heads),
        "lengths": list(shape.lengths),
        "pass": which,
        "arm": arm,
        "mode": mode,
        "gpu_ms": gpu_ms,
        "wall_ms": wall_ms,
        "host_us": host_us,
        "host_one_thread_us": host_one_thread_us,
        "host_in_a_row_us": host_in_a_row_us,
        "peak_bytes": peak_bytes,
        "saved_bytes": saved_bytes,
    }


def floor_rows(bench: Bench, shape: Shape, plan: Plan, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Rows of the arm "floor": what no implementation can undercut, for every pass and mode of the plan."""
    if bench.work is None:
        return []
    # In the order in which the arms name them, each once.
    modes = list(dict.fromkeys(mode for arm in plan.arms if not arm.peer for mode in arm.modes)) or [None]
    rows = []
    for which in plan.passes:
        for mode in [None] if which == "fwd" else modes:
            parts: tuple[Pass, ...] = ("fwd_train", "bwd") if which == "fwd+bwd" else (which,)
            gpu_ms = ceilings.floor_ms(*(bench.work(shape, part, mode) for part in parts))
            rows.append(row(bench.op, shape, which, "floor", mode, gpu_ms=gpu_ms))
    return rows


def describe(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
