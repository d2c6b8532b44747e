"""One rank's part of a run over several: the same passes with a pack's tokens spread over a process group.

Every rank makes the whole pack's inputs, runs the call alone on its device for the truth, and checks its own
tokens' results against it. Rank 0 then times the call alone, and all ranks time it under contexts, together.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cake.core.bench import _passes
from cake.core.bench._measure import Contender, measure
from cake.core.bench._meter import Meter, meter
from cake.core.bench._model import Arm, Bench, Call, Inputs, Shape
from cake.core.bench._runner import Plan, Results, describe, record
from cake.core.cp import KcpContext, build_kcp_context
from cake.core.testing import relative_error

__all__ = ["SpreadRunner", "fla_context"]

_log = logging.getLogger("cake")
# How long ranks that have met wait until they start together, in seconds: longer than the farewell takes.
_HEAD_START = 1e-3
# Seconds for which a rank whose call failed waits for the others.
_PATIENCE = 60.0


class SpreadRunner:
    """Runs a plan on this rank and fills ``results``; every rank of the default group runs the same one.

    Args:
        bench: The op's part.
        plan: What to measure.
        layouts: Of contexts, see ``cake.core.cp.build_kcp_context``.
        device: This rank's.
        on_step: Called before each step with a line that says what runs now.
        on_shape: Called with the results so far when a shape is done.
    """

    def __init__(
        self,
        bench: Bench,
        plan: Plan,
        layouts: Sequence[str],
        device: torch.device,
        *,
        on_step: Callable[[str], object] = lambda line: None,
        on_shape: Callable[[Results], object] = lambda results: None,
    ) -> None:
        self.results = Results()
        self._bench, self._plan, self._layouts, self._device = bench, plan, layouts, device
        self._on_step, self._on_shape = on_step, on_shape
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._alone = meter(device)
        self._meter = _Together(meter(device, _align))
        self._start = time.monotonic()

    def run(self) -> Results:
        """Measure everything that the time budget allows."""
        for shape in self._plan.shapes:
            if self._spent():
                self._note(f"{shape.name}: not run, the time budget is spent")
                continue
            self._run_shape(shape)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._on_shape(self.results)
        return self.results

    def _run_shape(self, shape: Shape) -> None:
        whole = self._bench.inputs(shape, self._device, self._plan.seed)
        truth = self._one_rank(shape, whole)
        if truth is None:
            return
        for layout in self._layouts:
            try:
                context = build_kcp_context(shape.boundaries, layout=layout, device=self._device)
            except ValueError as error:  # on every rank alike
                self._fail(f"{shape.name}, {layout}: {describe(error)}", failed=True)
                continue
            local = _shard(whole, context)
            contenders = [
                contender
                for arm, mode in self._plan.entries
                if (contender := self._checked(shape, layout, context, local, truth, arm, mode)) is not None
            ]
            self._time(shape, local, contenders, self._meter, layout)

    def _one_rank(self, shape: Shape, whole: Inputs) -> Mapping[str, torch.Tensor] | None:
        """The results of the first arm, of all tokens on one device; rank 0 times all arms that way."""
        truth, contenders = None, []
        for arm, mode in self._plan.entries:
            self._on_step(f"{shape.name}: {arm.name} on one rank")
            contender = None
            if truth is None or self._rank == 0:
                contender, found, error = _attempted(arm, mode, arm.load, whole)
                if error is not None and (truth is None or self._rank == 0):
                    self._fail(f"{shape.name}: {arm.name} on one rank: {describe(error)}", not arm.peer)
                truth = found if truth is None else truth
            if contender is not None:
                contenders.append(contender)
        if _any(truth is None):
            self._fail(f"{shape.name}: not run, no arm could be checked on one rank", failed=True)
            return None
        if self._rank == 0:
            self._time(shape, whole, contenders, self._alone, None)
        _meet()
        return truth

    def _checked(
        self,
        shape: Shape,
        layout: str,
        context: KcpContext,
        local: Inputs,
        truth: Mapping[str, torch.Tensor],
        arm: Arm,
        mode: str | None,
    ) -> Contender | None:
        """The contender, if its results agree with the truth on every rank."""
        name = self._arm(arm.name, layout)
        self._on_step(f"{shape.name}: check {name}")
        under = arm.under
        if under is None:
            self._note(f"{shape.name}: {arm.name} has no calls under a context")
            return None
        contender, found, error = _attempted(arm, mode, lambda: under(context, layout), local)
        if _failed(error):
            why = "another rank failed" if error is None else describe(error)
            self._fail(f"{shape.name}: {name}: {why}", not arm.peer)
            return None
        assert found is not None
        errors = {}
        for tensor, expected in truth.items():
            if _is_spread(expected, shape):
                mine, expected = found[tensor], context.shard(expected)
            else:  # of a parameter: each rank has its tokens' share
                mine = found[tensor].float().contiguous()
                dist.all_reduce(mine)
            errors[tensor] = _largest(relative_error(mine, expected) if expected.numel() else 0.0)
        passed = all(error <= self._bench.limit for error in errors.values())
        self.results.checks.append(
            {
                "op": self._bench.op,
                "shape": shape.name,
                "arm": name,
                "mode": mode,
                "against": "one rank",
                "errors": errors,
                "limit": self._bench.limit,
                "passed": passed,
            }
        )
        if not passed:
            listed = ", ".join(f"{tensor} {error:.1e}" for tensor, error in errors.items())
            self._fail(f"{shape.name}: {name} differs from one rank and is not timed: {listed}", failed=True)
            return None
        return contender

    def _time(
        self,
        shape: Shape,
        inputs: Inputs,
        contenders: Sequence[Contender],
        meter: Meter,
        layout: str | None,
    ) -> None:
        left = list(contenders)
        for which in self._plan.passes:
            self._on_step(f"{shape.name}: {which} {'on one rank' if layout is None else layout}")
            # Without a tape there is nothing that a mode could change: the first one stands for all.
            entered = [c for c in left if which != "fwd" or c.mode == c.arm.modes[0]]
            measurements = measure(
                which,
                inputs,
                entered,
                meter,
                warmups=self._plan.warmups,
                samples=self._plan.samples,
                profiles=self._plan.profiles,
            )
            for measurement in measurements:
                contender = measurement.contender
                name = self._arm(contender.arm.name, layout)
                if measurement.error is not None:
                    left.remove(contender)
                    what = f"{shape.name}, {which}: {name}: {describe(measurement.error)}"
                    self._fail(what, not contender.arm.peer)
                    continue
                if measurement.unprofiled is not None:
                    why = describe(measurement.unprofiled)
                    self._note(f"{shape.name}, {which}: {name} could not be profiled: {why}")
                more = {"world_size": 1 if layout is None else self._world, "layout": layout}
                record(self.results, self._bench, shape, which, name, measurement, None, **more)

    def _arm(self, name: str, layout: str | None) -> str:
        return name if layout is None else f"{name} x{self._world} {layout}"

    def _spent(self) -> bool:
        budget = self._plan.time_budget
        return _any(budget is not None and time.monotonic() - self._start >= budget)

    def _note(self, line: str) -> None:
        _log.info("%s", line)
        self.results.notes.append(line)

    def _fail(self, line: str, failed: bool) -> None:
        self._note(line)
        self.results.failed |= failed


class _Together:
    """A meter whose samples are of all ranks at once: the slowest one's. What fails on one fails on all."""

    def __init__(self, own: Meter) -> None:
        self._own = own

    def sample(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[float, float | None]:
        """See ``Meter``."""
        wall, host = self._all(lambda: self._own.sample(prepare, run))
        return _largest(wall), None if host is None else _largest(host)

    def kernels(
        self, prepare: Callable[[], Any], run: Callable[[Any], Any]
    ) -> list[tuple[str, float]] | None:
        """See ``Meter``: those of the rank whose sum is largest."""
        found = self._all(lambda: self._own.kernels(prepare, run))
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
        return None if found is None else max(everyones, key=lambda own: sum(ms for _, ms in own))

    def peak_bytes(self, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> int | None:
        """See ``Meter``."""
        found = self._all(lambda: self._own.peak_bytes(prepare, run))
        return None if found is None else int(_largest(float(found)))

    def synchronize(self) -> None:
        """See ``Meter``."""
        self._own.synchronize()

    def _all(self, do: Callable[[], Any]) -> Any:
        error: Exception | None = None
        try:
            found = do()
        except Exception as raised:
            error = raised
        if _failed(error):
            raise error or RuntimeError("another rank failed")
        return found


def _attempted(
    arm: Arm, mode: str | None, load: Callable[[], Call], inputs: Inputs
) -> tuple[Contender | None, dict[str, torch.Tensor] | None, Exception | None]:
    """One forward and backward of an arm: a contender and its results, or the error."""
    try:
        contender = Contender(arm, mode, load())
        with contender.configured():
            found, contender.saved_bytes = _passes.results(contender.call, inputs)
        if inputs.output_gradients[0] is not None and inputs.output_gradients[0].is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        _log.debug("%s", arm.name, exc_info=error)
        return None, None, error
    return contender, found, None


def fla_context(context: KcpContext, layout: str) -> Any:
    """What flash-linear-attention's builder makes of the same pack and group.

    Raises:
        ImportError: it isn't installed.
        NotImplementedError: it has no such layout.
    """
    from fla.ops.cp import build_cp_context

    if layout not in ("contiguous", "zigzag"):
        raise NotImplementedError(f"flash-linear-attention has no layout {layout!r}")
    bounds = torch.tensor(context.partition.boundaries)
    zigzag = {"layout": layout} if layout == "zigzag" else {}  # 0.5.2 has no such argument
    group = context.group or dist.group.WORLD
    return build_cp_context(bounds.to(context.device), group=group, cu_seqlens_cpu=bounds, **zigzag)


def _is_spread(x: torch.Tensor, shape: Shape) -> bool:
    """Whether a tensor of the pack has a row for each token."""
    return x.dim() > 2 and x.shape[:2] == (1, shape.tokens)


def _shard(whole: Inputs, context: KcpContext) -> Inputs:
    """This rank's part of the pack's inputs, in memory of its own; boundaries come with the context."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return context.shard(x.detach()).contiguous() if _is_spread(x, whole.shape) else x.detach()

    return Inputs(
        shape=whole.shape,
        tensors={
            name: part(x).requires_grad_(x.requires_grad)
            for name, x in whole.tensors.items()
            if name != "cu_seqlens"
        },
        output_gradients=tuple(None if x is None else part(x) for x in whole.output_gradients),
    )


def _align() -> None:
    """Returns on all ranks of this machine at the same time: their clock is one."""
    start = torch.tensor(time.monotonic() + _HEAD_START, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    while time.monotonic() < float(start):
        pass


def _meet() -> None:
    dist.all_reduce(torch.zeros(1))


def _largest(x: float) -> float:
    """The largest on any rank."""
    largest = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _any(flag: bool) -> bool:
    """Whether it holds on any rank."""
    return bool(_largest(float(flag)))


def _failed(error: Exception | None) -> bool:
    """Whether a call under a context failed on any rank.

    Ranks that wait for this one's part of an exchange don't come here: then it ends its process, and with it
    the run, since nothing else would reach them.
    """
    if error is None:
        return _any(False)

    def end() -> None:
        sys.stderr.write(f"{describe(error)}, and the other ranks wait for this one's part\n")
        sys.stderr.flush()
        os._exit(3)

    timer = threading.Timer(_PATIENCE, end)
    timer.daemon = True
    timer.start()
    try:
        return _any(True)
    finally:
        timer.cancel()
