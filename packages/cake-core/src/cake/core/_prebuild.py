"""Builds everything an op can need before it is needed, several compilers at once, with or without a GPU."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from cake.core import _compile, build, cache, config, loader, registry, toolchain
from cake.core.errors import BuildError

__all__ = ["architectures", "build_all", "prebuild", "release"]

logger = logging.getLogger("cake.prebuild")


def prebuild(
    op: str,
    device: Any = None,
    arch: str | Sequence[str] | None = None,
    max_workers: int | None = None,
    **model_params: Any,
) -> tuple[cache.Entry, ...]:
    """Build every library that a call of ``op`` can need; after it no route of the op compiles anything.

    What this process has prebuilt is remembered until ``cake.core.release()``: a second call returns at
    once, and loading looks at neither sources nor compilers. A terminal gets a progress bar on stderr, the
    logger "cake" gets a line per library.

    Args:
        op: an installed op's name.
        device: the CUDA device to build for; every visible one if neither it nor ``arch`` is given.
        arch: ``sm_90a`` in any spelling, or several. No GPU is needed or looked at then.
        max_workers: compilers that run at once; CAKE_JOBS, MAX_JOBS, then the usable CPUs if not given.
        model_params: parameters of the model that the op's declaration lists; an op that is specialised on
            none of them builds the same whatever they are.

    Returns:
        The cache entries, in the order of the op's records.

    Raises:
        UnknownOpError: no such op.
        TypeError: a model parameter that the op doesn't list.
        ValueError: both device and arch, a wrong arch, or neither while there is no GPU.
        NotImplementedError: the op has no kernels for an architecture.
        NoBuildError, ToolchainError, BuildError: as ``cake.core.load``; the builds that succeeded are kept.
    """
    spec = registry.op_spec(op)
    for name in model_params:
        if name not in spec.prebuild_params:
            known = ", ".join(spec.prebuild_params) or "none"
            raise TypeError(f"prebuild({op!r}) takes no parameter {name!r}; the op lists: {known}")
    archs = architectures(device, arch)
    if sys.stderr.isatty():
        return _with_bar(op, archs, max_workers)
    return build_all(op, archs, max_workers, logger.info)


def architectures(device: Any = None, arch: str | Sequence[str] | None = None) -> tuple[str, ...]:
    """What to build for: ``arch``, else the device's, else what is configured, else every visible GPU's.

    Raises:
        ValueError: both are given, one is wrong, or nothing says what to build for.
    """
    if arch is not None and device is not None:
        raise ValueError(f"give device or arch, not both, got device={device!r} and arch={arch!r}")
    if arch is not None:
        return toolchain.parse_arch_list(arch if isinstance(arch, str) else ";".join(arch))
    if device is not None:
        return (toolchain.device_arch(device),)
    configured = config.setting("cuda_arch_list").value
    if configured is not None:
        return toolchain.parse_arch_list(configured)
    import torch

    found = tuple(dict.fromkeys(toolchain.device_arch(i) for i in range(torch.cuda.device_count())))
    if not found:
        raise ValueError(
            "no GPU is visible, so say what to build for: arch='sm_90a' (--arch sm_90a, CAKE_CUDA_ARCH_LIST)"
        )
    return found


def build_all(
    op: str,
    archs: Iterable[str],
    max_workers: int | None,
    line: Callable[[str], object],
    step: Callable[[int, int, tuple[str, ...]], object] | None = None,
) -> tuple[cache.Entry, ...]:
    """Build every record of ``op`` for ``archs`` in a pool of threads that wait for compilers.

    Args:
        line: called with one line of text per finished library.
        step: called with (finished, total, names being compiled) whenever that changes.
    """
    wanted = [pair for arch in archs for pair in loader.libraries(op, arch)]
    workers = min(toolchain.jobs(max_workers), len(wanted))
    building: dict[str, float] = {}
    finished = 0
    lock = threading.Lock()

    def show() -> None:
        if step is not None:
            step(finished, len(wanted), tuple(building))

    def one(package: build.Package, record: build.Record) -> cache.Entry:
        nonlocal finished
        name = f"{record.library} ({record.arch})"

        def begun() -> None:
            with lock:
                building[name] = time.monotonic()
                show()

        how = "failed"
        try:
            entry = loader.prebuilt(op, package, record) or loader.ensure(package, record, on_build=begun)
            loader.remember(op, package, record, entry)
            how = "ready"
            return entry
        finally:
            with lock:
                since = building.pop(name, None)
                finished += 1
                if since is not None and how == "ready":
                    how = f"built in {time.monotonic() - since:.1f} s"
                line(f"[{finished}/{len(wanted)}] {name}: {how}")
                show()

    show()
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="cake-prebuild")
    futures = [pool.submit(one, package, record) for package, record in wanted]
    try:
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, BuildError):
                raise error  # missing toolchain, forbidden build: the others would say the same
        return tuple(future.result() for future in futures)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(
            future.done() for future in futures
        ):  # again: a thread may just be starting its compiler
            _compile.stop()
            time.sleep(0.05)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_bar(op: str, archs: tuple[str, ...], max_workers: int | None) -> tuple[cache.Entry, ...]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"cake prebuild {op} {' '.join(archs)}", total=None, now="")

        def step(finished: int, total: int, names: tuple[str, ...]) -> None:
            progress.update(task, completed=finished, total=total, now=", ".join(names))

        return build_all(op, archs, max_workers, progress.console.print, step)


def release() -> None:
    """Forget what this process has prebuilt."""
    loader.forget_prebuilt()
