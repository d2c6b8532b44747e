"""Filling the caches of libraries that compile when they are first called, several shapes at once."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

_MAIN = "from cake.core.cli import main; raise SystemExit(main())"


def precompile(
    op: str,
    shapes: Sequence[str],
    peers: Sequence[str],
    device: str,
    *,
    jobs: int,
    timeout: float | None = None,
    on_step: Callable[[str], object] = lambda line: None,
) -> list[str]:
    """Run every shape once, untimed, each in a process of its own.

    Only what a library keeps on disk helps the run that follows; compilers that keep nothing compile again.

    Args:
        op: The op's name.
        shapes: Names of shapes.
        peers: Arms besides the op's own.
        device: Where, as ``--device`` says it.
        jobs: Processes at a time.
        timeout: Seconds after which a process is killed.
        on_step: Called when a process is done.

    Returns:
        A line for each process that failed.
    """

    def run(shape: str, folder: str) -> str | None:
        out = Path(folder) / f"{shape}.json"
        words = ["bench", op, "--device", device, "--shapes", shape, "--vs", ",".join(peers)]
        words += ["--passes", "fwd", "--samples", "1", "--warmups", "0", "--profiles", "0", "--out", str(out)]
        problem = None
        try:
            done = subprocess.run(
                [sys.executable, "-c", _MAIN, *words],
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            problem = f"{shape}: compiling ahead took more than {timeout:.0f} s"
        else:
            # An arm that failed is no concern here: the run that follows says which.
            if not out.exists():
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                problem = f"{shape}: compiling ahead failed: {last}"
        on_step(f"{shape}: compiled ahead")
        return problem

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(jobs, 1)) as executor:
        return [problem for problem in executor.map(run, shapes, repeat(folder)) if problem is not None]
