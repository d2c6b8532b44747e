"""The table of a verification, and its JSON."""

from __future__ import annotations

import dataclasses
import datetime
import math
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from cake.core import provenance, registry
from cake.core.verify._runner import Outcome

if TYPE_CHECKING:
    from rich.table import Table

_ALWAYS = ("torch", "triton", "apache-tvm-ffi", "cake-core")


def header(ops: Sequence[str], device: torch.device, seed: int) -> dict[str, Any]:
    """Where it ran: device, versions, kernel hashes, date."""
    specs = [registry.op_spec(op) for op in ops]
    found = {}
    for name in (*_ALWAYS, *(spec.distribution for spec in specs)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = device.type == "cuda"
    return {
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": dict(sorted(found.items())),
        "kernels": {spec.name: provenance.kernel_hash(spec) for spec in specs},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
    }


def document(head: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is written as JSON; an error that is no number is null."""
    return {
        "header": head,
        "passed": all(outcome.passed for outcome in outcomes),
        "outcomes": [
            {
                **dataclasses.asdict(outcome),
                "errors": _finite(outcome.errors),
                "worst_blocks": _finite(outcome.worst_blocks),
            }
            for outcome in outcomes
        ],
    }


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line per gate: of accuracy gates the tensor that is nearest to its limit."""
    from rich.table import Table

    made = Table(title_justify="left")
    for name in ("op", "case", "gate", "variant", "closest to its limit"):
        made.add_column(name)
    made.add_column("seconds", justify="right")
    made.add_column("")
    previous: tuple[str, str] | None = None
    for outcome in outcomes:
        place = (outcome.op, outcome.case)
        if previous not in (None, place):
            made.add_section()
        closest = outcome.closest
        made.add_row(
            outcome.op if previous is None or previous[0] != outcome.op else "",
            outcome.case if previous != place else "",
            outcome.gate,
            outcome.variant,
            "" if closest is None else f"{closest[0]} {closest[1]:.1e} of {closest[2]:.1e}",
            f"{outcome.seconds:.1f}",
            "[green]ok[/green]" if outcome.passed else "[bold red]FAILED[/bold red]",
        )
        previous = place
    return made


def _finite(errors: dict[str, float]) -> dict[str, float | None]:
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}
