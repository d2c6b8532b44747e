"""The ranks of ``cake bench --world-size``: processes of this machine that meet in a process group."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from cake.core.bench._runner import Results

__all__ = ["joined", "run_ranks", "say_step"]

_MAIN = "from cake.core.cli import main; raise SystemExit(main())"
_STEP = "step: "
# A collective gives up after it. A rank may have to wait for another one's compiler.
_COLLECTIVE_SECONDS = 600.0
# What the others are left with when one has ended with an error, and what a run may take beyond its budget.
_GRACE, _OVERTIME = 15.0, 240.0


@contextlib.contextmanager
def joined(rank: int, world_size: int, meet: str, device: str) -> Iterator[None]:
    """A rank's side: within it this rank has met the others, a GPU's through NCCL and a CPU's through gloo.

    A group that is left to the end of its process may abort it there. After an error it is left to it all the
    same: others may wait in it.

    Args:
        rank, world_size: of the default group.
        meet: a file of the run's own.
        device: "cuda" or "cpu".
    """
    import torch.distributed as dist

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=_COLLECTIVE_SECONDS),
    )
    yield
    dist.destroy_process_group()


def say_step(line: str) -> None:
    """A rank's side: tells what begins."""
    sys.stdout.write(f"{_STEP}{line}\n")
    sys.stdout.flush()


def run_ranks(
    words: Sequence[str],
    world_size: int,
    *,
    seconds: float | None = None,
    on_step: Callable[[str], object] = lambda line: None,
) -> Results:
    """Run ``cake bench`` in a process for each rank, and return what rank 0 found.

    When a rank ends with an error, the others are given a moment and then ended too.

    Args:
        words: The command's words but for rank and output.
        world_size: Ranks.
        seconds: After which nothing new is begun, and minutes later everything is ended; None for no end.
        on_step: Called with a line before each step.
    """
    results = Results()
    with tempfile.TemporaryDirectory(prefix="cake-bench-") as name:
        folder = Path(name)
        ranks = [_Rank(rank, world_size, words, folder) for rank in range(world_size)]
        try:
            reader = threading.Thread(target=_read, args=(ranks[0].lines, on_step), daemon=True)
            reader.start()
            late = _wait(ranks, None if seconds is None else seconds + _OVERTIME)
        finally:
            for rank in ranks:
                rank.kill()
        reader.join()
        if ranks[0].out.exists():
            found: dict[str, Any] = json.loads(ranks[0].out.read_text(encoding="utf-8"))
            results.rows, results.kernels = found["rows"], found["kernels"]
            results.checks, results.notes = found["checks"], found["notes"]
        for rank in ranks:
            # 0 and 1 are a run's own: all went well, or a note says what did not.
            if rank.status not in (0, 1):
                results.notes.append(f"rank {rank.number}: {rank.last_words()}")
        if late:
            results.notes.append("the ranks were ended, for they took too long")
        results.failed = late or any(rank.status != 0 for rank in ranks)
    return results


class _Rank:
    def __init__(self, number: int, world_size: int, words: Sequence[str], folder: Path) -> None:
        self.number, self.out = number, folder / f"{number}.json"
        self._log = (folder / f"{number}.log").open("w+")
        mine = ["--world-size", str(world_size), "--rank", str(number), "--meet", str(folder / "meet")]
        command = [sys.executable, "-c", _MAIN, *words, *mine, "--out", str(self.out)]
        environment = dict(os.environ)
        if sys.platform == "linux":
            # They are of one machine, whatever its name resolves to.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=self._log,
            env=environment,
            text=True,
        )

    @property
    def lines(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def last_words(self) -> str:
        lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"ended with status {self.status}: {lines[-1] if lines else 'no message'}"

    def kill(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()


def _read(lines: IO[str], on_step: Callable[[str], object]) -> None:
    for line in lines:
        if line.startswith(_STEP):
            on_step(line[len(_STEP) :].rstrip())


def _wait(ranks: Sequence[_Rank], seconds: float | None) -> bool:
    """Until all have ended, or some moments after one ended with an error; whether it took too long."""
    start, broken = time.monotonic(), None
    while any(rank.status is None for rank in ranks):
        now = time.monotonic()
        if broken is None and any(rank.status not in (None, 0, 1) for rank in ranks):
            broken = now
        if broken is not None and now - broken > _GRACE:
            return False
        if seconds is not None and now - start > seconds:
            return True
        time.sleep(0.1)
    return False
