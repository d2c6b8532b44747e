"""Finds nvcc and the host compiler, and says in one sentence what is missing. Touches no GPU and imports no
torch."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core import config, env
from cake.core.errors import ToolchainError

__all__ = [
    "MIN_CUDA",
    "Nvcc",
    "check_arch",
    "check_driver",
    "device_arch",
    "driver_cuda",
    "find_nvcc",
    "host_compiler",
    "jobs",
    "parse_arch",
    "parse_arch_list",
]

MIN_CUDA: dict[str, tuple[int, int]] = {
    "sm_90a": (12, 3),
    "sm_100a": (12, 8),
    "sm_103a": (12, 9),
    "sm_107a": (13, 4),
}
"""Architecture -> the first CUDA release whose nvcc builds for it."""

INSTALL = "pip install 'cake-core[nvcc]'"

_ARCH = re.compile(r"(?:sm_|compute_)?(?:(\d{1,2})\.(\d)|(\d{2,3}))(a?)(?:\+ptx)?\Z", re.IGNORECASE)
_VERSION = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")
_FIRST_EXACT_ARCH = 90  # from Hopper on the tensor-core instructions exist in the "a" targets only


@dataclass(frozen=True)
class Nvcc:
    """A compiler that was found and asked for its version.

    Args:
        path: the executable, symbolic links as they came.
        version: "13.0.88".
        how: where it was found: "CAKE_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH" or "wheel".
        identity: the version lines that it prints; two compilers that may differ in their output differ here.
        notes: places that come earlier in the order and had no usable nvcc, one sentence each.
    """

    path: Path
    version: str
    how: str
    identity: str
    notes: tuple[str, ...] = ()

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) of the CUDA release."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


# ---- architectures


def parse_arch(text: str) -> str:
    """The architecture as nvcc's ``code=`` spells it, from any common spelling.

    ``9.0``, ``9.0a``, ``90``, ``90a``, ``sm_90``, ``sm_90a``, ``compute_90a`` and ``9.0+PTX`` are all
    ``sm_90a``: from 9.0 on cake builds only the architecture-specific target, and such a target has no PTX
    that another could run.

    Raises:
        ValueError: not an architecture.
    """
    match = _ARCH.match(text.strip())
    if match is None:
        raise ValueError(f"arch must look like 'sm_90a', '90a' or '9.0', got {text!r}")
    major, minor, digits, suffix = match.groups()
    number = int(major) * 10 + int(minor) if digits is None else int(digits)
    if number >= _FIRST_EXACT_ARCH:
        return f"sm_{number}a"
    if suffix:
        raise ValueError(f"arch {text!r} does not exist: architecture-specific targets begin at 9.0")
    return f"sm_{number}"


def parse_arch_list(text: str) -> tuple[str, ...]:
    """The architectures of a list like ``9.0a;10.0+PTX`` (semicolons, commas or spaces), each once, in its
    order.

    Raises:
        ValueError: an item that isn't an architecture, or none at all.
    """
    found = tuple(dict.fromkeys(parse_arch(item) for item in re.split(r"[;,\s]+", text) if item))
    if not found:
        raise ValueError(f"architecture list is empty, got {text!r}")
    return found


def device_arch(device: Any) -> str:
    """The architecture of a CUDA device: ``sm_90a`` for an H100 or H200.

    Args:
        device: a ``torch.device``, its string or an index.

    Raises:
        ValueError: not a CUDA device, or one that isn't there.
    """
    import torch

    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be a CUDA device, got {device!r}") from None
    if where.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {str(where)!r}")
    try:
        major, minor = torch.cuda.get_device_capability(where)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device must be a CUDA device that is there, got {str(where)!r}: {error}") from None
    return parse_arch(f"{major}.{minor}")


# ---- nvcc


def find_nvcc() -> Nvcc:
    """The nvcc to use: the configured one (CAKE_NVCC), else the first of CUDA_HOME, CUDA_PATH, PATH and the
    PyPI wheels.

    A place without a usable nvcc (a CUDA_HOME that holds only the runtime, say) is passed over and
    remembered in ``notes``. CAKE_NVCC is an order: where it doesn't work, nothing else is tried.

    Raises:
        ToolchainError: none was found; the message names every place that was looked at, and what to do.
    """
    explicit = config.setting("nvcc")
    if explicit.value is not None:
        how = "CAKE_NVCC" if explicit.source.startswith("environment") else explicit.source
        found, why = _ask(Path(explicit.value).expanduser(), how, ())
        if found is None:
            raise ToolchainError(
                f"{how}={explicit.value} {why}; point it at an nvcc, or unset it to have one looked for"
            )
        return found
    notes: list[str] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = env.get(variable)
        if home is None:
            notes.append(f"{variable} is unset")
            continue
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.exists():
            what = "holds a CUDA runtime but no bin/nvcc" if _has_runtime(Path(home)) else "has no bin/nvcc"
            notes.append(f"{variable}={home} {what}")
            continue
        found, why = _ask(nvcc, variable, tuple(notes))
        if found is not None:
            return found
        notes.append(f"{variable}={home}: bin/nvcc {why}")
    on_path = shutil.which("nvcc")
    if on_path is None:
        notes.append("PATH has no nvcc")
    else:
        found, why = _ask(Path(on_path), "PATH", tuple(notes))
        if found is not None:
            return found
        notes.append(f"{on_path} (on PATH) {why}")
    wheels = _wheel_nvccs()
    if not wheels:
        notes.append("no PyPI wheel nvidia-cuda-nvcc is installed")
    for wheel in wheels:
        found, why = _ask(wheel, "wheel", tuple(notes))
        if found is not None:
            return found
        notes.append(f"{wheel} (PyPI wheel) {why}")
    usual = Path("/usr/local/cuda")
    fix = f"set CUDA_HOME={usual}" if (usual / "bin" / "nvcc").exists() else "set CUDA_HOME to a CUDA toolkit"
    raise ToolchainError(f"no nvcc: {'; '.join(notes)}. To get one: {INSTALL}, or {fix}")


def _has_runtime(home: Path) -> bool:
    return any(any(home.glob(pattern)) for pattern in ("lib*/libcudart.so*", "targets/*/lib/libcudart.so*"))


def _wheel_nvccs() -> list[Path]:
    """nvcc executables below the namespace package ``nvidia``, newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [folder for root in roots for folder in Path(root).glob("cu*/bin/nvcc")]

    def cuda(nvcc: Path) -> int:
        digits = nvcc.parent.parent.name[2:]
        return int(digits) if digits.isdigit() else 0  # cu13, cu14; the older cuda_nvcc last

    return sorted(folders, key=lambda nvcc: (-cuda(nvcc), str(nvcc)))


def _ask(path: Path, how: str, notes: tuple[str, ...]) -> tuple[Nvcc | None, str]:
    """The compiler at ``path``, or None and why it can't be used."""
    try:
        stat = path.stat()
    except OSError:
        return None, "does not exist"
    if not path.is_file() or not os.access(path, os.X_OK):
        return None, "is not an executable file"
    version, identity, why = _version(str(path), stat.st_mtime_ns, stat.st_size)
    if version is None:
        return None, why
    return Nvcc(path, version, how, identity, notes), ""


@functools.lru_cache(maxsize=16)
def _version(path: str, mtime_ns: int, size: int) -> tuple[str | None, str, str]:
    """(version, identity, why not); the stat values only key the cache, so that a replaced compiler is asked
    again."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, "", f"could not be run ({error})"
    match = _VERSION.search(done.stdout)
    if done.returncode != 0 or match is None:
        return None, "", f"is not an nvcc (--version exited {done.returncode} and named no version)"
    start = match.start()
    line = done.stdout.rfind("\n", 0, start) + 1
    return ".".join(match.groups()), done.stdout[line:].strip(), ""


def environment() -> dict[str, str]:
    """The environment that compilers run in: nvcc's own flag variables are dropped, since they'd bypass the
    cache key."""
    return {k: v for k, v in os.environ.items() if k not in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")}


def check_arch(nvcc: Nvcc, arch: str) -> None:
    """Refuse a compiler that can't build for ``arch``.

    Raises:
        ToolchainError: the compiler is too old; the message names the release that is needed.
    """
    least = MIN_CUDA.get(arch)
    if least is not None and nvcc.release < least:
        raise ToolchainError(
            f"{arch} needs CUDA {least[0]}.{least[1]} or newer, and nvcc at {nvcc.path} (from {nvcc.how}) is "
            f"{nvcc.version}; install a newer one ({INSTALL}) and point CAKE_NVCC or CUDA_HOME at it"
        )


def host_compiler() -> Path:
    """The C++ compiler that nvcc runs for host code: NVCC_CCBIN if set, else g++ on PATH.

    Raises:
        ToolchainError: there is none.
    """
    named = env.get("NVCC_CCBIN")
    found = shutil.which(named) if named is not None else shutil.which("g++")
    if found is not None:
        return Path(found)
    if named is not None:
        raise ToolchainError(
            f"NVCC_CCBIN={named} is not an executable; point it at a C++ compiler, or unset it to use g++"
        )
    also = " (gcc is there, but without g++ it compiles no C++)" if shutil.which("gcc") else ""
    raise ToolchainError(
        f"nvcc needs the host compiler g++, and PATH has none{also}; install it "
        "(apt-get install g++, dnf install gcc-c++) or set NVCC_CCBIN to a C++ compiler"
    )


# ---- the machine


@functools.lru_cache(maxsize=1)
def driver_cuda() -> tuple[int, int] | None:
    """The CUDA release that the installed driver serves, None without a driver. Initialises no GPU."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
        value = ctypes.c_int(0)
        status = libcuda.cuDriverGetVersion(ctypes.byref(value))
    except (OSError, AttributeError):
        return None
    if status != 0 or value.value <= 0:
        return None
    return value.value // 1000, value.value % 1000 // 10


def expose_driver(what: str) -> None:
    """Make the driver's functions visible to libraries that are loaded from now on and call them.

    Raises:
        ToolchainError: there is no driver; ``what`` names the library that needs it.
    """
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"{what} calls the CUDA driver, which can't be loaded ({error})") from error


def check_driver(version: str, what: str) -> None:
    """Refuse a library whose CUDA major is newer than the driver's, before anything is launched.

    Args:
        version: the nvcc that built it, or would: "13.0.88".
        what: the library, for the message.

    Raises:
        ToolchainError: the driver is too old. Without a driver nothing is checked.
    """
    driver = driver_cuda()
    major = int(version.split(".")[0])
    if driver is not None and major > driver[0]:
        raise ToolchainError(
            f"{what} comes from nvcc {version} and needs a driver for CUDA {major}, but this machine's "
            f"driver serves CUDA {driver[0]}.{driver[1]}; update the driver, or point "
            f"CAKE_NVCC at an nvcc of CUDA {driver[0]}"
        )


def jobs(max_workers: int | None = None) -> int:
    """How many compilers run at once: the argument, configure(), CAKE_JOBS, MAX_JOBS, the
    usable CPUs.

    Raises:
        ConfigError: not a whole number of at least 1; the message names where it came from.
    """
    configured = config.setting("jobs", max_workers).value
    if configured is not None:
        return int(configured)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
