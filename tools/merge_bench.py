#!/usr/bin/env python3
"""Time every build of the affine merge on this machine's GPU: which is fastest at which load.

    python3 tools/merge_bench.py --out packages/cake-core/benchmarks/results/h200-merge.json
    python3 tools/merge_bench.py --from packages/cake-core/benchmarks/results/h200-merge.json

The load of a merge is T = n_chains * ncols / 128, and `cake.core.state_chain.BANDS` chooses the columns per
block by it. Each merge here has one chain of 16 steps for each head, on tiles that no cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cake.core import state_chain

ARCH, STEPS = "sm_90a", 16
# Both sides of every border of the bands, and what lies between.
LOADS = (2, 4, 8, 10, 12, 16, 18, 24, 32, 34, 40, 48, 64, 66, 68, 96, 98, 100, 128, 192)
NBYTES_PER_S = 4.3e12
# What is closer than that is one time.
NOISE = 0.02


def floor_us(load: int, ncols: int, steps: int = STEPS) -> float:
    """Microseconds for reading each tile of B and M once, and writing each state."""
    heads = load * 128 // ncols
    return 1e6 * 4 * 128 * steps * heads * (2 * ncols + 128) / NBYTES_PER_S


def measure(samples: int) -> list[dict[str, Any]]:
    """One row for each load, number of columns, direction and build: the median of `samples`, in us."""
    import torch

    from cake.core import loader

    device = torch.device("cuda", torch.cuda.current_device())
    library = loader.load("gdn", "affine_merge", arch=ARCH, package="state_chain")
    chains = (tuple((i, i, i) for i in range(STEPS)),)
    rows = []
    for ncols in state_chain.STATE_COLUMNS:
        for load in LOADS:
            heads = load * 128 // ncols
            b = torch.randn(STEPS, heads, 128, ncols, device=device)
            m = torch.randn(STEPS, heads, 128, 128, device=device) / 12
            out = torch.empty_like(b)
            cold = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
            for transposed in (False, True):
                times: dict[int, list[float]] = {width: [] for width in state_chain.COLUMNS}
                for sample in range(samples + 1):
                    for width in state_chain.COLUMNS:  # in turn, so that a changing clock meets all alike
                        cold.fill_(1)
                        torch.cuda._sleep(200_000)  # the host is ahead
                        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        start.record()
                        state_chain.launch_merge(
                            library, ARCH, b, m, chains, STEPS,
                            columns=width, transposed=transposed, out=out,
                        )  # fmt: skip
                        end.record()
                        torch.cuda.synchronize()
                        if sample:
                            times[width].append(1e3 * start.elapsed_time(end))
                for width, found in times.items():
                    rows.append(
                        {
                            "ncols": ncols,
                            "load": load,
                            "transposed": transposed,
                            "columns": width,
                            "us": statistics.median(found),
                            "floor_us": floor_us(load, ncols),
                        }
                    )
    return rows


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], dict[int, float]]:
    """For each (ncols, load) the time of each build, both directions together."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        builds = found.setdefault((row["ncols"], row["load"]), {})
        builds[row["columns"]] = builds.get(row["columns"], 0.0) + row["us"]
    return found


def slower(rows: Iterable[Mapping[str, Any]], arch: str = ARCH) -> list[str]:
    """Where the bands choose a build that another one beats, in words."""
    found = []
    for (ncols, load), builds in totals(rows).items():
        chosen = state_chain.columns_per_block(load * 128 // ncols, ncols, arch)
        best = min(builds, key=lambda width: builds[width])
        if builds[chosen] > (1 + NOISE) * builds[best]:
            found.append(
                f"ncols {ncols}, load {load}: {chosen} columns take {builds[chosen] / 2:.1f} us, "
                f"{best} take {builds[best] / 2:.1f}"
            )
    return found


def bands(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int | None, int]]:
    """The bands that these rows ask for: at each load the build whose times over the best one's sum least."""
    by_load: dict[int, dict[int, float]] = {}
    for (_, load), builds in totals(rows).items():
        best = min(builds.values())
        into = by_load.setdefault(load, {})
        for width, us in builds.items():
            into[width] = into.get(width, 0.0) + us / best
    made: list[tuple[int | None, int]] = []
    for load in sorted(by_load):
        width = min(by_load[load], key=lambda w: by_load[load][w])
        if made and made[-1][1] == width:
            made.pop()
        made.append((load, width))
    return [*made[:-1], (None, made[-1][1])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds of each build, mean of both directions; the bands' choice in brackets."""
    lines = [
        f"{'ncols':>6}{'load':>6}" + "".join(f"{width:>9}" for width in state_chain.COLUMNS) + "    floor"
    ]
    for (ncols, load), builds in totals(rows).items():
        chosen = state_chain.columns_per_block(load * 128 // ncols, ncols, ARCH)
        cells = [f"[{us / 2:.1f}]" if width == chosen else f"{us / 2:.1f}" for width, us in builds.items()]
        lines.append(
            f"{ncols:>6}{load:>6}" + "".join(f"{x:>9}" for x in cells) + f"{floor_us(load, ncols):>9.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--from", dest="source", type=Path, help="judge the rows of a JSON; measure nothing")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--commit", help="recorded where the sources are no git checkout")
    args = parser.parse_args()
    if args.source is not None:
        rows = json.loads(args.source.read_text())["rows"]
    else:
        rows = measure(args.samples)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"header": header(args), "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print(f"bands of the table: {state_chain.BANDS[ARCH]}; of these times: {tuple(bands(rows))}")
    for line in slower(rows):
        print(line)
    return 1 if slower(rows) else 0


def header(args: argparse.Namespace) -> dict[str, Any]:
    """Where and how the rows were measured."""
    import datetime

    import torch

    from cake.core import provenance, registry
    from cake.core.bench import git_commit

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": provenance.kernel_hash(registry.op_spec("gdn")),
        "commit": args.commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "method": f"one chain of {STEPS} steps a head, events around a launch, L2 flushed, builds in turn, "
        f"median of {args.samples}; floor_us: bytes of all tiles over {NBYTES_PER_S:g} B/s",
    }


if __name__ == "__main__":
    sys.exit(main())
