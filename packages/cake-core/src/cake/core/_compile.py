"""Runs nvcc in a build folder and judges what it said."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core import build, ptxas, toolchain
from cake.core.errors import BuildError
from cake.core.toolchain import Nvcc

__all__ = ["Toolkit", "compile_record", "stop", "toolkit"]


_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Toolkit:
    """The compilers of one build."""

    nvcc: Nvcc
    host: Path


def toolkit(nvcc: Nvcc, arch: str) -> Toolkit:
    """The compilers for ``arch``, checked before anything is written or run.

    Raises:
        ToolchainError: nvcc is too old for ``arch``, or there is no host compiler.
    """
    toolchain.check_arch(nvcc, arch)
    return Toolkit(nvcc, toolchain.host_compiler())


def compile_record(
    package: build.Package, record: build.Record, tools: Toolkit, work: Path
) -> dict[str, Any]:
    """Compile ``record`` in ``work``, which holds the sources, into ``work/<library>.so``.

    Returns:
        What ``meta.json`` says of the build: command, versions, seconds, and registers and spills of each
        kernel.

    Raises:
        BuildError: nvcc failed, or a kernel spills or has a remark that the record doesn't allow.
    """
    command = build.command(package, record, tools.nvcc.path, tools.host)
    first = work / package.root.name / record.sources[0]
    link = (
        work / build.TVM_FFI
    )  # a relative name keeps this machine's paths out of the library and out of -I with spaces
    link.symlink_to(build.tvm_ffi_root(), target_is_directory=True)
    begin = time.monotonic()
    status, output = _run(command, work)
    seconds = time.monotonic() - begin
    shown = shlex.join(command)
    if status != 0:
        how = f"exit status {status}" if status > 0 else f"signal {-status}"
        _forget(work, record)
        raise BuildError(
            f"nvcc could not build {record.library} for {record.arch} ({how})",
            command=shown,
            output=output,
            source=str(first),
        )
    if not (work / f"{record.library}.so").is_file():
        raise BuildError(
            f"nvcc built {record.library} for {record.arch} but left no library",
            command=shown,
            output=output,
            source=str(first),
        )
    kernels, remarks = ptxas.parse(output)
    bad = ptxas.complaints(remarks, record.allow)
    if bad:
        _forget(work, record)
        raise BuildError(
            f"{record.library} for {record.arch} compiled, but not as it must (a record's 'allow' can accept "
            "it by kind and kernel):\n  " + "\n  ".join(bad),
            command=shown,
            output=output,
            source=str(first),
        )
    link.unlink()  # what failed keeps it, so that its command can be run again where it is kept
    return {
        "schema": build.SCHEMA,
        "arch": record.arch,
        "command": command,
        "nvcc": {"version": tools.nvcc.version, "identity": tools.nvcc.identity, "found": tools.nvcc.how},
        "host_compiler": _first_line([str(tools.host), "--version"]),
        "tvm_ffi": build.tvm_ffi_version(),
        "functions": list(record.functions),
        "kernels": [kernel.as_dict() for kernel in kernels],
        "remarks": [list(remark) for remark in remarks],
        "seconds": round(seconds, 3),
        "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _forget(work: Path, record: build.Record) -> None:
    """Leave only sources in a folder that is kept for reading."""
    (work / f"{record.library}.so").unlink(missing_ok=True)


def stop() -> None:
    """Kill the compilers that this process has running, children included, after an interrupt."""
    for process in tuple(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _run(command: list[str], cwd: Path) -> tuple[int, str]:
    """(exit status, both output streams). An interrupted wait takes the compiler and its children down."""
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=toolchain.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that killing it reaches cicc, ptxas and g++
        )
    except OSError as error:
        message = f"{command[0]} could not be started ({error.strerror})"
        raise BuildError(message, command=shlex.join(command)) from error
    _running.add(process)
    try:
        output, _ = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        _running.discard(process)
    return process.returncode, output.decode("utf-8", errors="replace")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0] if done.stdout else ""
