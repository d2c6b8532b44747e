"""The gates: accuracy of every case and variant, then bits of calls that must agree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from cake.core.testing import Limit, assert_bitwise_equal, assert_within, error_report
from cake.core.verify._model import Case, Given, Verify

Results = Mapping[str, torch.Tensor]

REPEATS = 5


@dataclass
class Outcome:
    """What one gate found. ``errors`` and ``limits`` by tensor, of accuracy gates alone."""

    op: str
    case: str
    gate: str
    variant: str
    passed: bool
    message: str
    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    worst_blocks: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def closest(self) -> tuple[str, float, float] | None:
        """The tensor that is nearest to its limit or farthest beyond: name, error, limit."""
        if not self.errors:
            return None

        def share(name: str) -> float:
            return max(self.errors[name], self.worst_blocks.get(name, 0.0) / 2) / self.limits[name]

        name = max(self.errors, key=share)
        return name, self.errors[name], self.limits[name]


class Runner:
    """Runs the gates of an op.

    Args:
        verify: The op's part.
        variants: Which variants; bits are compared of "det" alone.
        device: Where.
        cases: Which cases; None runs all.
        seed: Of the inputs.
        on_step: Called before each gate with a line that says what runs now.
    """

    def __init__(
        self,
        verify: Verify,
        variants: tuple[str, ...],
        device: torch.device,
        *,
        cases: tuple[Case, ...] | None = None,
        seed: int = 0,
        on_step: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._verify = verify
        self._variants = variants
        self._device = device
        self._cases = verify.cases if cases is None else cases
        self._seed = seed
        self._on_step = on_step

    def run(self) -> list[Outcome]:
        """Every gate's outcome. A gate that raises has failed."""
        found = []
        for case in self._cases:
            truth: Results | None = None
            for variant in self._variants:
                self._on_step(f"{case.name}: accuracy, {variant}")
                began = time.perf_counter()
                try:
                    truth = self._truth(case) if truth is None else truth
                    found.append(self._accuracy(case, variant, truth, began))
                except Exception as error:
                    found.append(self._broken(case, "accuracy", variant, error, began))
            if case.bits and "det" in self._variants:
                for gate, check in self._gates(case):
                    self._on_step(f"{case.name}: {gate}")
                    found.append(self._bits(case, gate, check))
        return found

    def _truth(self, case: Case) -> Results:
        return self._verify.reference(case.make(self._device, self._seed))

    def _accuracy(self, case: Case, variant: str, truth: Results, began: float) -> Outcome:
        given = case.make(self._device, self._seed)
        found = self._results(given, variant, self._verify.tapes[0])
        limits = {name: case.limits.get(name, self._verify.limits[name]) for name in truth}
        report = error_report(
            found,
            truth,
            boundaries=given.boundaries,
            per_sequence=[name for name in self._verify.states if name in truth],
            whole=[name for name in self._verify.whole if name in truth],
            least_rms={name: rms for name, rms in case.least_rms.items() if name in truth},
            # A part of a few tokens has few values, maybe all small: it counts as an average one.
            block_floor=1.0,
        )
        try:
            assert_within(report, {name: Limit(limit) for name, limit in limits.items()})
            passed, message = True, ""
        except AssertionError as error:
            passed, message = False, str(error).partition("\n\n")[0]
        return Outcome(
            op=self._verify.op,
            case=case.name,
            gate="accuracy",
            variant=variant,
            passed=passed,
            message=message,
            seconds=time.perf_counter() - began,
            errors={tensor.name: tensor.error for tensor in report.tensors},
            worst_blocks={tensor.name: tensor.worst_block for tensor in report.tensors if tensor.blocks},
            limits=limits,
        )

    def _gates(self, case: Case) -> Iterator[tuple[str, Callable[[Results], None]]]:
        tapes = self._verify.tapes

        def again(expected: Results) -> None:
            for _ in range(REPEATS):
                _same(self._det(case, tapes[0]), expected)

        def thread(expected: Results) -> None:
            found: list[Any] = []

            def work() -> None:
                try:
                    found.append(self._det(case, tapes[0]))
                except Exception as error:
                    found.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
            if isinstance(found[0], Exception):
                raise found[0]
            _same(found[0], expected)

        def side_stream(expected: Results) -> None:
            # The inputs get their values there, behind work that takes a while: a kernel that goes to another
            # stream reads them before, when they are no numbers.
            stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            given = case.make(self._device, self._seed)
            busy = torch.empty(1 << 26, device=self._device)
            torch.cuda.synchronize(self._device)
            for _ in range(REPEATS):
                with torch.cuda.stream(stream):
                    late = _late(given, busy)
                    found = self._results(late, "det", tapes[0])
                stream.synchronize()
                _same(found, expected)

        def as_tape(tape: str, expected: Results) -> None:
            _same(self._det(case, tape), expected)

        yield f"{REPEATS} calls alike", again
        for tape in tapes[1:]:
            yield f"{tapes[0]} as {tape}", partial(as_tape, tape)
        yield "another thread", thread
        if len(case.make(self._device, self._seed).boundaries or ()) > 2:
            yield "documents alone", partial(self._alone, case)
        if self._device.type == "cuda":
            yield "another stream", side_stream

    def _alone(self, case: Case, expected: Results) -> None:
        whole = case.make(self._device, self._seed)
        bounds = whole.boundaries or ()
        for i, (start, end) in enumerate(pairwise(bounds)):
            given = self._document(whole, i, start, end)
            found = self._results(given, "det", self._verify.tapes[0])
            part = {name: self._part(name, x, i, start, end) for name, x in expected.items()}
            for name in self._verify.whole:  # a sum over the pack
                found.pop(name, None)
                part.pop(name, None)
            _same(found, part)

    def _document(self, whole: Given, i: int, start: int, end: int) -> Given:
        def part(name: str, x: torch.Tensor) -> torch.Tensor:
            cut = self._part(name, x.detach(), i, start, end)
            return cut.requires_grad_() if x.requires_grad else cut

        return replace(
            whole,
            tensors={name: part(f"d{name}", x) for name, x in whole.tensors.items()},
            loss={name: part(name, x) for name, x in whole.loss.items()},
            boundaries=(0, end - start),
        )

    def _part(self, name: str, x: torch.Tensor, i: int, start: int, end: int) -> torch.Tensor:
        """A document's part of a result, of a gradient, or of the tensor that the gradient belongs to."""
        if name in self._verify.whole:
            return x
        return x[i : i + 1] if name in self._verify.states else x[:, start:end]

    def _bits(self, case: Case, gate: str, check: Callable[[Results], None]) -> Outcome:
        began = time.perf_counter()
        try:
            check(self._det(case, self._verify.tapes[0]))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except AssertionError as error:
            return self._outcome(case, gate, "det", False, str(error), began)
        except Exception as error:
            return self._broken(case, gate, "det", error, began)
        return self._outcome(case, gate, "det", True, "", began)

    def _det(self, case: Case, tape: str) -> Results:
        return self._results(case.make(self._device, self._seed), "det", tape)

    def _results(self, given: Given, variant: str, tape: str) -> dict[str, torch.Tensor]:
        results = self._verify.call(given, variant, tape)
        leaves = {name: x for name, x in given.tensors.items() if x.requires_grad}
        grads = torch.autograd.grad(
            [results[name] for name in given.loss], list(leaves.values()), list(given.loss.values())
        )
        found = {name: x.detach() for name, x in results.items()}
        return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    def _broken(self, case: Case, gate: str, variant: str, error: Exception, began: float) -> Outcome:
        return self._outcome(case, gate, variant, False, f"{type(error).__name__}: {error}", began)

    def _outcome(
        self, case: Case, gate: str, variant: str, passed: bool, message: str, began: float
    ) -> Outcome:
        seconds = time.perf_counter() - began
        return Outcome(self._verify.op, case.name, gate, variant, passed, message, seconds)


def _late(given: Given, busy: torch.Tensor) -> Given:
    """The same call, whose tensors get their values on the current stream once `busy` has been filled."""
    tensors, loss = (
        {name: torch.full_like(x.detach(), float("nan")) for name, x in part.items()}
        for part in (given.tensors, given.loss)
    )
    for _ in range(20):
        busy.normal_()
    for late, part in ((tensors, given.tensors), (loss, given.loss)):
        for name, x in part.items():
            late[name].copy_(x.detach()).requires_grad_(x.requires_grad)
    return replace(given, tensors=tensors, loss=loss)


def _same(found: Results, expected: Results) -> None:
    if set(found) != set(expected):
        raise AssertionError(f"one call gives {sorted(found)}, another {sorted(expected)}")
    for name, x in found.items():
        assert_bitwise_equal(name, x, expected[name])
