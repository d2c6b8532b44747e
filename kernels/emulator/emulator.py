"""Builds libraries of kernels with g++, so that a CPU runs them: the Python side of emulator.h.

A library is what its record of ``build.json`` says, host entries and device code as they are, but for what
g++ can't compile: launches, dynamic shared memory, and the functions that consist of inline PTX. Those are
taken out of copies of the sources; ``instructions.h`` has functions by the same names.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm_ffi

from cake.core import build, toolchain

HERE = Path(__file__).resolve().parent
BUILDS = HERE.parent.parent / "build" / "emulator"
ARCH = "sm_90a"
COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")

LAUNCH = re.compile(r"kernel<<<grid, threads, shared_bytes, stream>>>\(args\.\.\.\);")
LAUNCHED = (
    "const std::string wrong =\n"
    "      cake::emulator::launch(grid, threads, shared_bytes, [&] { kernel(args...); });\n"
    '  if (!wrong.empty()) TVM_FFI_THROW(RuntimeError) << name << ": " << wrong;'
)
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) uint8_t (\w+)\[\];")
FUNCTION = re.compile(r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ ", re.MULTILINE)


class Library:
    """A library that runs on a CPU; its functions are attributes, as of a loaded one for the GPU."""

    def __init__(self, path: Path) -> None:
        self._module = tvm_ffi.load_module(str(path))
        self._set = ctypes.CDLL(str(path)).cake_emulator_set
        self._set.argtypes = [ctypes.c_uint64, ctypes.c_int]

    def schedule(self, seed: int, multiprocessors: int = 132) -> None:
        """How the calls to come are scheduled: even numbers late, odd ones at random; see emulator.h.

        Args:
            multiprocessors: how many a host entry is told of; an H200 has 132.
        """
        self._set(seed, multiprocessors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def load(folder: Path | str, library: str) -> Library:
    """The library of a kernel package, built if its sources or the emulator's have changed.

    Args:
        folder: of the kernel package; its ``build.json`` has a record of ``library`` for sm_90a.

    Raises:
        ToolchainError: there is no C++ compiler, or tvm-ffi isn't installed.
        RuntimeError: g++ failed; the message holds what it said.
    """
    package = build.read_package(folder)
    record = package.record(library, ARCH)
    if record is None:
        raise ValueError(f"{folder}/build.json has no library {library!r} for {ARCH}")
    files = {name: translated(text.decode()) for name, text in build.source_files(package, record).items()}
    own = {path.name: path.read_text() for path in HERE.iterdir() if path.suffix in (".h", ".cc", ".py")}
    runtime, key = _key(sorted(own.items())), _key(sorted(own.items()), files, build.tvm_ffi_version())
    place, made = BUILDS / f"runtime-{runtime}", BUILDS / f"{library}-{key}"
    with _locked(place):
        if not (place / "emulator.o").exists():
            _compile_runtime(place / "emulator.o")
    with _locked(made):
        if not (made / f"{library}.so").exists():
            _compile(made, package, record, files, place / "emulator.o")
    return Library(made / f"{library}.so")


def translated(source: str) -> str:
    """A source as g++ compiles it."""
    source = LAUNCH.sub(LAUNCHED, source)
    source = DYNAMIC.sub(r"uint8_t* const \1 = cake::emulator::shared_memory();", source)
    kept, end = [], 0
    for start, stop in _functions(source):
        if "asm" in source[start:stop]:
            kept.append(source[end:start])
            end = stop
    return "".join([*kept, source[end:]])


def _functions(source: str) -> Iterator[tuple[int, int]]:
    """Where each device function begins and ends."""
    for match in FUNCTION.finditer(source):
        depth, at = 0, source.index("{", match.end())
        while True:
            depth += {"{": 1, "}": -1}.get(source[at], 0)
            at += 1
            if depth == 0:
                break
        yield match.start(), at


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _compile_runtime(target: Path) -> None:
    made = target.with_suffix(".making")
    sources = map(str, sorted(HERE.glob("*.cc")))
    _run(str(toolchain.host_compiler()), *COMMON, "-O2", "-nostdlib", "-r", *sources, "-o", str(made))
    made.rename(target)


def _compile(
    place: Path, package: build.Package, record: build.Record, files: dict[str, str], runtime: Path
) -> None:
    ffi, made = build.tvm_ffi_root(), place / "making.so"
    for name, text in files.items():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    include = [f"-I{HERE}", *(f"-I{place / folder}" for folder in (package.root.name, *package.include))]
    sources = [str(place / package.root.name / source) for source in record.sources]
    device = ["-O1", "-w", "-include", str(HERE / "instructions.h"), *include, f"-I{ffi / 'include'}"]
    link = ["-shared", "-x", "none", str(runtime), f"-L{ffi / 'lib'}", "-ltvm_ffi", "-Wl,-z,defs"]
    compiler = str(toolchain.host_compiler())
    _run(compiler, *COMMON, *device, "-x", "c++", *sources, *link, "-o", str(made))
    made.rename(place / f"{record.library}.so")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-8000:]}")


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """For one process at a time: several workers of a test run want the same library."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
