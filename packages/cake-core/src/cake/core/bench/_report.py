"""Where a run took place, its JSON, and its table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cake.core import provenance, registry
from cake.core.bench._floor import host_floor
from cake.core.bench._meter import CudaMeter
from cake.core.bench._model import PASSES, Bench
from cake.core.bench._runner import Plan, Results

if TYPE_CHECKING:
    from rich.table import Table

_ALWAYS = ("torch", "triton", "apache-tvm-ffi", "cake-core")


def header(bench: Bench, plan: Plan, device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, commit, date and how it was measured; what can't be told is None.

    Args:
        bench: The op's part: its distributions' versions are listed too.
        plan: What was measured.
        device: Where.
        commit: Overrides what git says, for a copy of the tree that is no checkout.
    """
    spec = registry.op_spec(bench.op)
    floor, floor_one_thread = {}, {}
    if device.type == "cuda":
        meter = CudaMeter(device)
        floor = host_floor(meter, device)
        with torch.autograd.set_multithreading_enabled(False):
            floor_one_thread = host_floor(meter, device)
    found = {name: _version(name) for name in (*_ALWAYS, spec.distribution, *bench.distributions)}
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else None,
        "driver": _nvidia_smi("driver_version") if device.type == "cuda" else None,
        "sm_clock": _nvidia_smi("clocks.sm") if device.type == "cuda" else None,
        "device": str(device),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": dict(sorted(found.items())),
        "kernels": provenance.kernel_hash(spec),
        "host_floor_us": floor,
        "host_floor_one_thread_us": floor_one_thread,
        "commit": commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["cake", *sys.argv[1:]]),
        "method": {
            "samples": plan.samples,
            "warmups": plan.warmups,
            "profiles": plan.profiles,
            "seed": plan.seed,
            "gpu_ms": "sum of device activities of one pass (torch.profiler), median of the profiled runs",
            "wall_ms": "CUDA events around the eager call (a CPU: host clock), L2 flushed and device idle "
            "before each sample, arms in turn, in another order each round, median",
            "host_us": "time until the eager call returns, same samples, median",
            "host_one_thread_us": "the same with autograd's engine in the calling thread "
            "(torch.autograd.set_multithreading_enabled(False)), in samples of its own, of a backward",
            "host_in_a_row_us": "the same in one thread, of calls of one arm one behind another: the host's "
            "caches hold the call's own code",
            "host_floor_us": "of an autograd node of five inputs that launches nothing, calls one behind "
            "another; host_floor_one_thread_us: the same in one thread",
            "peak_bytes": "most device memory in use during the pass beyond the inputs (bwd: with the tape)",
            "saved_bytes": "memory that the forward saves for the backward beyond the inputs",
        },
    }


def git_commit(near: Path | None = None) -> str | None:
    """The commit of the checkout of this file, with "+" where files differ from it; None without git."""
    folder = (near or Path(__file__)).resolve().parent
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _output("git", "-C", str(folder), "status", "--porcelain", "-uno") else "")


def document(head: dict[str, Any], results: Results, earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is written to the results file.

    Args:
        head: The run's ``header``.
        results: What it found.
        earlier: The document of an earlier run: its shapes that this run has not measured are kept, and its
            header under ``header["earlier"]``, so that the shapes of a long benchmark may run one by one. The
            arms of one shape always come from one run.
    """
    made: dict[str, Any] = {
        "header": head,
        "rows": results.rows,
        "kernels": results.kernels,
        "checks": results.checks,
        "notes": results.notes,
    }
    if earlier is None:
        return made
    old = earlier["header"]
    measured = {row["shape"] for row in results.rows}
    kept = {
        part: [entry for entry in earlier[part] if entry["shape"] not in measured]
        for part in ("rows", "kernels", "checks")
    }
    return {
        "header": {
            **head,
            "earlier": [*old.get("earlier", []), {k: v for k, v in old.items() if k != "earlier"}],
        },
        **{part: kept[part] + made[part] for part in kept},
        "notes": [*earlier["notes"], *results.notes],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that the path holds the whole old content or the whole new one at every moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def table(results: Results) -> Table:
    """One line per shape, arm and mode; per pass ``gpu / wall`` in ms, or the one that there is."""
    from rich.table import Table

    passes = [which for which in PASSES if any(row["pass"] == which for row in results.rows)]
    profiled = any(row["gpu_ms"] is not None for row in results.rows)
    made = Table(title="gpu / wall in ms" if profiled else "wall in ms", title_justify="left")
    for name in ("shape", "heads", "arm", "mode"):
        made.add_column(name)
    for name in (*passes, "host us", "1 thread", "in a row", "peak MB", "saved MB"):
        made.add_column(name, justify="right")
    previous = None
    for (shape, heads, arm, mode), rows in _grouped(results.rows):
        if previous not in (None, shape):
            made.add_section()
        by_pass = {row["pass"]: row for row in rows}
        last = rows[-1]
        made.add_row(
            "" if shape == previous else shape,
            "" if shape == previous else f"{heads[0]},{heads[1]}",
            arm,
            mode or "",
            *(_times(by_pass.get(which)) for which in passes),
            _number(last["host_us"], 1.0, ".0f"),
            _number(last.get("host_one_thread_us"), 1.0, ".0f"),
            _number(last.get("host_in_a_row_us"), 1.0, ".0f"),
            _number(last["peak_bytes"], 1e-6, ".1f"),
            _number(last["saved_bytes"], 1e-6, ".1f"),
        )
        previous = shape
    return made


def _grouped(rows: Sequence[dict[str, Any]]) -> Iterable[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Rows by shape, arm and mode. A forward without a mode joins the arm's first mode."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    modes: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        place = (row["shape"], tuple(row["heads"]), row["arm"])
        if row["mode"] is not None:
            modes.setdefault(place, row["mode"])
    for row in rows:
        place = (row["shape"], tuple(row["heads"]), row["arm"])
        mode = row["mode"] if row["mode"] is not None else modes.get(place)
        groups.setdefault((*place, mode), []).append(row)
    # Shapes and arms in the order of their first rows.
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    return sorted(groups.items(), key=lambda item: (shapes.index(item[0][0]), arms.index(item[0][2])))


def _times(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return " / ".join(format(row[key], ".3f") for key in ("gpu_ms", "wall_ms") if row[key] is not None)


def _number(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(value * scale, form)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi(field: str) -> str | None:
    found = _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return found.splitlines()[0] if found else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
