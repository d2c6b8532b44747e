"""Shapes in processes of their own that compile side by side and are then timed one after another.

Some libraries compile for minutes when they are first called with a head count, and keep little of it for
another process. So a process runs its shapes once, untimed, says that it is ready, and waits: its turn comes
when all are ready, and nothing else uses the device then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from cake.core.bench._model import Shape
from cake.core.bench._runner import Results

READY = "ready for its turn"
_MAIN = "from cake.core.cli import main; raise SystemExit(main())"


def wait_for_turn() -> float | None:
    """A process's side: says that it is ready and waits; the seconds that it is given, None for no end.

    Raises:
        SystemExit: The other side has gone.
    """
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the run that this process belongs to has ended")
    seconds: float | None = json.loads(line)
    return seconds


def groups(shapes: Sequence[Shape], processes: int) -> list[list[Shape]]:
    """Shapes by head counts, which is what others compile for, dealt to at most so many processes."""
    by_heads: dict[tuple[int, int], list[Shape]] = {}
    for shape in shapes:
        by_heads.setdefault(shape.heads, []).append(shape)
    dealt: list[list[Shape]] = [[] for _ in range(min(max(processes, 1), len(by_heads)))]
    for i, group in enumerate(by_heads.values()):
        dealt[i % len(dealt)] += group
    return dealt


def run_in_turn(
    words: Sequence[str],
    shapes: Sequence[Shape],
    *,
    processes: int,
    seconds: float | None = None,
    on_step: Callable[[str], object] = lambda line: None,
    on_shapes: Callable[[Results], object] = lambda results: None,
) -> Results:
    """Run ``cake bench`` in processes that compile side by side and are timed in turn.

    Args:
        words: The command's words but for shapes and output.
        shapes: What to measure.
        processes: How many at most.
        seconds: After which nothing new is begun; None for no end.
        on_step: Called with a line when a process is ready or done.
        on_shapes: Called with the results so far when a process is done.

    Returns:
        What all of them found. A process that died or was not ready in time is a note, and makes it failed.
    """
    results, start = Results(), time.monotonic()

    def left() -> float | None:
        return None if seconds is None else max(seconds - (time.monotonic() - start), 0.0)

    with tempfile.TemporaryDirectory() as folder:
        children = [
            _Child(group, words, Path(folder) / str(i), left())
            for i, group in enumerate(groups(shapes, processes))
        ]
        try:
            for child in children:
                ready = child.ready.wait(left())
                on_step(f"{child}: {'compiled' if ready and not child.gone else 'not compiled'}")
            for child in children:
                child.take_turn(left(), results)
                on_step(f"{child}: timed")
                on_shapes(results)
        finally:
            for child in children:
                child.kill()
    return results


class _Child:
    """A process with its shapes."""

    def __init__(
        self, shapes: Sequence[Shape], words: Sequence[str], folder: Path, seconds: float | None
    ) -> None:
        folder.mkdir()
        self._names = ",".join(shape.name for shape in shapes)
        self._out, self._log = folder / "results.json", (folder / "log").open("w+")
        budget = [] if seconds is None else ["--time-budget", str(seconds)]
        command = [
            sys.executable,
            "-c",
            _MAIN,
            *words,
            *budget,
            "--shapes",
            self._names,
            "--out",
            str(self._out),
        ]
        self._process = subprocess.Popen(
            [*command, "--in-turn"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self.ready, self.gone = threading.Event(), False
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def __str__(self) -> str:
        return self._names

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.strip() == READY:
                self.ready.set()
        self.gone = not self.ready.is_set()
        self.ready.set()

    def take_turn(self, seconds: float | None, results: Results) -> None:
        """Let the process time its shapes, and add what it found."""
        if not self.ready.is_set():
            results.notes.append(f"{self}: was not ready in time")
            results.failed = True
            return
        if not self.gone:
            try:
                self._stdin.write(f"{json.dumps(seconds)}\n")
                self._stdin.close()
            except BrokenPipeError:
                pass  # it has died since; its exit status says so
        status = self._process.wait()
        if not self._out.exists():
            self._log.seek(0)
            last = (self._log.read().strip().splitlines() or ["no message"])[-1]
            results.notes.append(f"{self}: failed: {last}")
            results.failed = True
            return
        found: dict[str, Any] = json.loads(self._out.read_text(encoding="utf-8"))
        results.rows += found["rows"]
        results.kernels += found["kernels"]
        results.checks += found["checks"]
        results.notes += found["notes"]
        results.failed |= status != 0

    def kill(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._log.close()
