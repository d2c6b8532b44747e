"""Ranks of a torch.distributed group for tests: processes that run functions of a test file."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["Outcome", "Ranks"]

#: Seconds after which a collective gives up, and after which a test does.
COLLECTIVE_TIMEOUT = 100.0
JOB_TIMEOUT = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a function came to on one rank: its result, or the kind and the text of its exception.

    seconds: how long it took. A process that is gone has neither a result nor an error.
    """

    value: Any
    error: str | None
    message: str
    seconds: float
    gone: bool = False


class Ranks:
    """A pool of `size` processes with a process group each of the first 1, 2, … `size` of them.

    Use as a context manager. Functions are named by file and name, since the modules of test files can't be
    imported elsewhere; arguments and results are pickled, and there is one thread to a process.

    Args:
        size: processes.
        subgroup_timeout: seconds after which a collective of fewer ranks than all gives up.
        timeout: the same of all.
        backend: "gloo", or "nccl" for a GPU to each process, its current one.
    """

    def __init__(
        self,
        size: int,
        subgroup_timeout: float = COLLECTIVE_TIMEOUT,
        backend: str = "gloo",
        *,
        timeout: float = COLLECTIVE_TIMEOUT,
    ):
        self.size, self._timeouts, self._backend = size, (subgroup_timeout, timeout), backend
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="cake-ranks-")
        meet = str(Path(self._folder.name) / "meet")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, rank, self.size, meet, self._timeouts, self._backend, os.getpid()),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any, world: int | None = None) -> list[Outcome]:
        """Runs `function(group, *arguments)` on the first `world` ranks, by default on all.

        `group` is the process group; None, the default one, where all take part and have no `timeout`.

        Raises:
            AssertionError: a rank hasn't answered in time; all of them are killed.
        """
        world = self.size if world is None else world
        code = inspect.unwrap(function).__code__
        job = pickle.dumps((code.co_filename, function.__name__, world, arguments))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(job)
        deadline = time.monotonic() + JOB_TIMEOUT
        outcomes = []
        for rank, pipe in enumerate(self._pipes[:world]):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                    for process in self._processes:
                        process.kill()
                    raise AssertionError(f"rank {rank} hasn't answered after {JOB_TIMEOUT:g} s")
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionError):
                outcomes.append(Outcome(None, None, "", 0.0, gone=True))
        return outcomes

    def values(self, function: Callable[..., Any], *arguments: Any, world: int | None = None) -> list[Any]:
        """Results of `run` on every rank.

        Raises:
            AssertionError: the function raised on some rank.
        """
        outcomes = self.run(function, *arguments, world=world)
        failures = [
            f"rank {rank}: {'gone' if outcome.gone else outcome.message}"
            for rank, outcome in enumerate(outcomes)
            if outcome.gone or outcome.error is not None
        ]
        if failures:
            raise AssertionError("\n".join(failures))
        return [outcome.value for outcome in outcomes]


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    meet: str,
    timeouts: tuple[float, float],
    backend: str,
    parent: int,
) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit, own = (datetime.timedelta(seconds=seconds) for seconds in timeouts)
    # To meet takes as long as the slowest process needs to start.
    meeting = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{meet}", rank=rank, world_size=size, timeout=meeting
    )
    dist.barrier()
    groups = [dist.new_group(list(range(n)), timeout=limit) for n in range(1, size)]
    groups.append(None if own == meeting else dist.new_group(list(range(size)), timeout=own))
    modules: dict[str, ModuleType] = {}
    while os.getppid() == parent:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            break
        started = time.monotonic()
        try:
            file, name, world, arguments = pickle.loads(job)
            if file not in modules:
                modules[file] = _module(file)
            value = getattr(modules[file], name)(groups[world - 1], *arguments)
            outcome = Outcome(value, None, "", time.monotonic() - started)
        except Exception as error:
            outcome = Outcome(None, type(error).__name__, traceback.format_exc(), time.monotonic() - started)
        pipe.send_bytes(pickle.dumps(outcome))
    # Without the farewell of a process group, which may wait for ranks that are gone.
    os._exit(0)


def _module(file: str) -> ModuleType:
    name = f"cake_ranks_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
