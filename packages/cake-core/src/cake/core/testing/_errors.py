"""Relative L2 errors of tensors, of their sequences and of their 64-token blocks, and limits on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

BLOCK = 64
BLOCK_FLOOR = 1e-2


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error ``||actual - expected|| / ||expected||``, computed in float64.

    Args:
        actual: Any real dtype, any device and strides.
        expected: The reference, of the same shape.

    Returns:
        The error. 0.0 for two tensors without elements and for two that are all zero; ``inf`` when the
        reference is zero and the other is not, and when either holds a NaN or an infinity, so that neither
        ever passes a limit.

    Raises:
        ValueError: The shapes differ.
    """
    difference, reference = _float64_pair("actual", actual, expected)
    return _ratio(_norm(difference), _norm(reference))


@dataclass(frozen=True)
class TensorError:
    """Errors of one tensor; every figure is a relative L2 error unless it says otherwise."""

    name: str
    #: Of the whole tensor.
    error: float
    #: ``max |actual - expected| / max |expected|``.
    max_error: float
    #: Root mean square of the reference, in the tensor's own units.
    rms: float
    #: One error per sequence; empty when the tensor was not cut into sequences.
    sequences: tuple[float, ...] = ()
    #: One error per block of tokens, in order; blocks restart at every sequence start.
    blocks: tuple[float, ...] = ()
    #: ``(sequence, first token within it)`` of each entry of ``blocks``.
    block_starts: tuple[tuple[int, int], ...] = ()

    @property
    def worst_sequence(self) -> float:
        """The largest entry of ``sequences``, or 0.0."""
        return max(self.sequences, default=0.0)

    @property
    def worst_block(self) -> float:
        """The largest entry of ``blocks``, or 0.0."""
        return max(self.blocks, default=0.0)

    def worst_block_at(self) -> str:
        """Where the worst block lies, in words."""
        if not self.blocks:
            return "no blocks"
        sequence, token = self.block_starts[self.blocks.index(self.worst_block)]
        return f"sequence {sequence}, tokens from {token}"


@dataclass(frozen=True)
class ErrorReport:
    """Errors of several tensors, by name. ``str()`` is a table."""

    tensors: tuple[TensorError, ...]

    def __getitem__(self, name: str) -> TensorError:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise LookupError(f"the report holds {', '.join(t.name for t in self.tensors)}, got {name!r}")

    def __str__(self) -> str:
        head = f"{'tensor':<16}{'error':>11}{'sequence':>11}{'block':>11}{'max':>11}{'rms':>11}  worst block"
        lines = [
            f"{t.name:<16}{t.error:>11.3e}{t.worst_sequence:>11.3e}{t.worst_block:>11.3e}"
            f"{t.max_error:>11.3e}{t.rms:>11.3e}  {t.worst_block_at()}"
            for t in self.tensors
        ]
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Limit:
    """Largest errors allowed for one tensor: for the whole, for each sequence and for each block.

    ``sequence`` and ``block`` are twice ``tensor`` when they are not given.
    """

    tensor: float
    sequence: float | None = None
    block: float | None = None


def error_report(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    boundaries: Sequence[int] | None = None,
    per_sequence: Collection[str] = (),
    whole: Collection[str] = (),
    least_rms: Mapping[str, float] | None = None,
    block: int = BLOCK,
    block_floor: float = BLOCK_FLOOR,
) -> ErrorReport:
    """Compare tensors by name: each as a whole, per sequence and per block of tokens.

    Token tensors are ``[B, T, ...]``; their first two axes are flattened to ``B * T`` tokens and cut at
    ``boundaries``. A block whose reference is next to nothing (a gradient under a strong gate) would make any
    rounding look huge, so its norm counts as at least ``block_floor`` times what a block of its size holds on
    average in this tensor; sequences likewise.

    Args:
        actual: Tensors by name, any real dtype and device.
        expected: References by the same names and shapes.
        boundaries: Cumulative sequence boundaries ``(0, ..., B * T)`` of the flattened tokens. None: every
            batch row is a sequence.
        per_sequence: Names of tensors ``[N, ...]`` with one entry per sequence (states); they get no blocks.
        whole: Names of tensors with neither tokens nor sequences (parameters' gradients).
        least_rms: By name, the root mean square below which a tensor's reference counts as if it had this
            one: for a gradient that is next to nothing as a whole, give its size at ordinary inputs.
        block: Tokens per block.
        block_floor: See above; 0 switches it off.

    Returns:
        The report, in the order of ``expected``.

    Raises:
        ValueError: The names or shapes differ, or the boundaries don't fit a tensor.
    """
    if set(actual) != set(expected):
        raise ValueError(f"actual must hold {sorted(expected)}, got {sorted(actual)}")
    for argument, names in (("per_sequence", per_sequence), ("whole", whole), ("least_rms", least_rms or ())):
        if unknown := set(names) - set(expected):
            raise ValueError(
                f"{argument} must name tensors of the report {sorted(expected)}, got {sorted(unknown)}"
            )
    floors = least_rms or {}
    tensors = []
    for name, reference in expected.items():
        error = _Comparison(name, actual[name], reference, floors.get(name, 0.0), block_floor)
        if name in whole:
            tensors.append(error.result())
        elif name in per_sequence:
            tensors.append(error.result(sequences=[(i, i + 1) for i in range(reference.shape[0])]))
        else:
            spans = _spans(name, reference, boundaries)
            tensors.append(error.flatten_tokens().result(sequences=spans, block=block))
    return ErrorReport(tuple(tensors))


def assert_within(report: ErrorReport, limits: Mapping[str, float | Limit]) -> None:
    """Assert that every tensor of the report is within its limit.

    Args:
        report: What ``error_report`` returned.
        limits: By name, a ``Limit``, or a number: the limit of the tensor, with twice it for each of its
            sequences and blocks. Every tensor of the report needs one.

    Raises:
        AssertionError: Some error is above its limit or not a number; the message holds each of them and the
            whole table.
        ValueError: The names of the limits and of the report differ.
    """
    names = {tensor.name for tensor in report.tensors}
    if names != set(limits):
        raise ValueError(f"limits must name {sorted(names)}, got {sorted(limits)}")
    failures = []
    for tensor in report.tensors:
        limit = limits[tensor.name]
        if not isinstance(limit, Limit):
            limit = Limit(limit)
        twice = 2.0 * limit.tensor
        per_sequence = twice if limit.sequence is None else limit.sequence
        per_block = twice if limit.block is None else limit.block
        if not tensor.error <= limit.tensor:
            failures.append(f"{tensor.name}: error {tensor.error:.3e}, limit {limit.tensor:.3e}")
        for index, error in enumerate(tensor.sequences):
            if not error <= per_sequence:
                failures.append(
                    f"{tensor.name}: sequence {index}: error {error:.3e}, limit {per_sequence:.3e}"
                )
        above = [i for i, error in enumerate(tensor.blocks) if not error <= per_block]
        if above:
            sequence, token = tensor.block_starts[above[0]]
            failures.append(
                f"{tensor.name}: {len(above)} of {len(tensor.blocks)} blocks above {per_block:.3e}: the "
                f"first is sequence {sequence}, tokens from {token}: {tensor.blocks[above[0]]:.3e}; "
                f"the worst is {tensor.worst_block_at()}: {tensor.worst_block:.3e}"
            )
    if failures:
        raise AssertionError("\n".join([*failures, "", str(report)]))


class _Comparison:
    """One tensor's difference and reference in float64, and the floors its parts are judged with."""

    def __init__(
        self, name: str, actual: torch.Tensor, expected: torch.Tensor, least_rms: float, floor: float
    ) -> None:
        self.name = name
        self.difference, self.reference = _float64_pair(name, actual, expected)
        self.rms = _norm(self.reference) / math.sqrt(max(self.reference.numel(), 1))
        self.least_rms = least_rms
        self.part_rms = max(least_rms, floor * self.rms)

    def flatten_tokens(self) -> _Comparison:
        self.difference = self.difference.flatten(0, 1)
        self.reference = self.reference.flatten(0, 1)
        return self

    def result(self, sequences: Sequence[tuple[int, int]] = (), block: int | None = None) -> TensorError:
        spans, starts = [], []
        if block is not None:
            for index, (first, last) in enumerate(sequences):
                for token in range(first, last, block):
                    spans.append((token, min(token + block, last)))
                    starts.append((index, token - first))
        count = self.reference.numel()
        return TensorError(
            name=self.name,
            error=_ratio(
                _norm(self.difference), max(_norm(self.reference), self.least_rms * math.sqrt(count))
            ),
            max_error=_ratio(_largest(self.difference), max(_largest(self.reference), self.least_rms)),
            rms=self.rms,
            sequences=tuple(self._parts(sequences)),
            blocks=tuple(self._parts(spans)),
            block_starts=tuple(starts),
        )

    def _parts(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        if not spans:
            return []
        # One sum per token first: thousands of blocks then cost two passes over the tensor, not two each.
        rows = self.reference.shape[0]
        per_row = self.reference.numel() // max(rows, 1)
        differences = self.difference.reshape(rows, per_row).square().sum(1).tolist()
        references = self.reference.reshape(rows, per_row).square().sum(1).tolist()
        errors = []
        for first, last in spans:
            least = self.part_rms * math.sqrt((last - first) * per_row)
            norm = math.sqrt(math.fsum(references[first:last]))
            errors.append(_ratio(math.sqrt(_sum(differences[first:last])), max(norm, least)))
        return errors


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.inf


def _float64_pair(
    name: str, actual: torch.Tensor, expected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(actual - expected, expected)`` in float64; the first is infinite where either is not finite."""
    if actual.shape != expected.shape:
        raise ValueError(
            f"{name} must have the reference's shape {list(expected.shape)}, got {list(actual.shape)}"
        )
    device = actual.device if actual.device == expected.device else torch.device("cpu")
    value = actual.detach().to(device=device, dtype=torch.float64)
    reference = expected.detach().to(device=device, dtype=torch.float64)
    finite = torch.isfinite(value) & torch.isfinite(reference)
    difference = torch.where(finite, value - reference, torch.inf)
    return difference, torch.where(finite, reference, 0.0)


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _ratio(difference: float, reference: float) -> float:
    if difference == 0.0:
        return 0.0
    if not math.isfinite(difference) or reference == 0.0:
        return math.inf
    return difference / reference


def _spans(name: str, tensor: torch.Tensor, boundaries: Sequence[int] | None) -> list[tuple[int, int]]:
    if tensor.dim() < 2:
        raise ValueError(f"{name} must be [B, T, ...] to be cut into tokens, got {list(tensor.shape)}")
    rows, tokens = tensor.shape[:2]
    if boundaries is None:
        return [(row * tokens, (row + 1) * tokens) for row in range(rows)]
    cuts = [int(b) for b in boundaries]
    total = rows * tokens
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != total or any(a > b for a, b in pairwise(cuts)):
        raise ValueError(f"boundaries must ascend from 0 to {name}'s {total} tokens, got {cuts}")
    return list(pairwise(cuts))
