"""A toolkit that compiles nothing, for tests of what surrounds a compiler, and small kernel packages to feed
it.

``FakeToolkit`` is a folder laid out like a CUDA toolkit. Its nvcc checks that it was given files, sleeps as
long as it is told to, and copies a small real library that exports ``answer() -> 42`` through tvm-ffi's C
interface; the bytes of the sources decide the bytes of the library. It needs a C compiler, once, to make
that library.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FakeToolkit", "raises_soon", "write_package"]

_NVCC = r"""
import hashlib, json, os, pathlib, sys, time

here = pathlib.Path(__file__).resolve().parent
plan = json.loads((here / "plan.json").read_text())
args = sys.argv[1:]
if args == ["--version"]:
    release = ".".join(plan["version"].split(".")[:2])
    print("nvcc: NVIDIA (R) Cuda compiler driver")
    print(f"Cuda compilation tools, release {release}, V{plan['version']}")
    print(f"Build fake_{plan['version']}")
    sys.exit(0)
log = os.open(here / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
os.write(log, (json.dumps({"pid": os.getpid(), "cwd": os.getcwd(), "args": args}) + "\n").encode())
for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
    if name in os.environ:
        sys.exit(f"fake nvcc: {name} reached the compiler")
sources = [a for a in args if a.endswith(".cu")]
digest = hashlib.sha256()
for name in sources:
    if os.path.isabs(name):
        sys.exit(f"fake nvcc: source {name} is absolute")
    digest.update(pathlib.Path(name).read_bytes())
print(plan["output"], file=sys.stderr)
out = args[args.index("-o") + 1]
if plan["seconds"]:
    with open(out, "wb") as half:
        half.write((here / "library.so").read_bytes()[:1000])
    time.sleep(plan["seconds"])
if plan["full_disk"]:
    out = "/dev/full"
if plan["status"]:
    sys.exit(plan["status"])
with open(out, "wb") as file:
    file.write((here / "library.so").read_bytes() + digest.digest())
"""

_LIBRARY = r"""
#include <tvm/ffi/c_api.h>
int __tvm_ffi_answer(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  (void)self; (void)args; (void)count;
  result->type_index = kTVMFFIInt; result->zero_padding = 0; result->v_int64 = 42;
  return 0;
}
"""


class FakeToolkit:
    """A folder with ``bin/nvcc``.

    Args:
        root: where to make it; may contain spaces.
        version: what ``--version`` says.
        seconds: how long a compile takes.
        status: what a compile exits with.
        output: what a compile prints.
        full_disk: the compile writes to /dev/full.
    """

    def __init__(
        self,
        root: Path,
        *,
        version: str = "13.0.88",
        seconds: float = 0.0,
        status: int = 0,
        output: str = "",
        full_disk: bool = False,
    ) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True, exist_ok=True)
        self.nvcc = self.bin / "nvcc"
        (self.bin / "nvcc.py").write_text(_NVCC)
        # By way of sh: a "#!" line can hold neither a space nor a long path.
        self.nvcc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{self.bin / "nvcc.py"}" "$@"\n')
        self.nvcc.chmod(0o755)
        self._plan: dict[str, Any] = {}
        self.plan(version=version, seconds=seconds, status=status, output=output, full_disk=full_disk)
        (self.bin / "library.so").write_bytes(_library())

    def plan(self, **changes: Any) -> None:
        """Change what the next runs do: version, seconds, status, output, full_disk."""
        self._plan.update(changes)
        (self.bin / "plan.json").write_text(json.dumps(self._plan))
        if "version" in changes:  # the loader remembers a compiler's version by its size and time
            text = self.nvcc.read_text().splitlines()[:2]
            self.nvcc.write_text("\n".join([*text, f"# {changes['version']}", ""]))

    @property
    def compiles(self) -> list[dict[str, Any]]:
        """One record for each compile that was started: pid, cwd, args."""
        log = self.bin / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@functools.cache
def _library() -> bytes:
    """The real library that every compile yields, made once per process."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/bin:/usr/bin:/bin"  # also where a test has emptied PATH
    compiler = shutil.which("cc", path=path) or shutil.which("gcc", path=path)
    spec = importlib.util.find_spec("tvm_ffi")
    if compiler is None:
        pytest.skip("needs a C compiler to make the fake toolkit's library")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs apache-tvm-ffi")
    include = Path(next(iter(spec.submodule_search_locations)), "include")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "library.c"), Path(folder, "library.so")
        source.write_text(_LIBRARY)
        command = [compiler, "-shared", "-fPIC", f"-I{include}", "-o", str(library), str(source)]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})
        return library.read_bytes()


def raises_soon(
    kind: type[Exception], action: Callable[[], object], *, match: str | None = None, seconds: float = 1.0
) -> Exception:
    """The error that ``action`` raises, within ``seconds``: on a busy machine the best of three tries."""
    took = []
    for _ in range(3):
        begin = time.monotonic()
        with pytest.raises(kind, match=match) as caught:
            action()
        took.append(time.monotonic() - begin)
        if took[-1] < seconds:
            return caught.value
    raise AssertionError(f"{kind.__name__} came after {took} s, each time later than {seconds} s")


def write_package(
    module: Path,
    records: list[dict[str, Any]] | None = None,
    files: dict[str, str] | None = None,
    include: list[str] | None = None,
) -> Path:
    """Make a kernel package ``<module>/csrc`` and return its folder.

    Args:
        module: the folder that would be the op's module.
        records: records of ``build.json``; by default one, of library "tiny" for sm_90a from "tiny.cu".
        files: contents by name relative to ``module``; by default "csrc/tiny.cu".
        include: the include folders; none by default.
    """
    root = module / "csrc"
    for name, text in (files or {"csrc/tiny.cu": "// tiny\n"}).items():
        (module / name).parent.mkdir(parents=True, exist_ok=True)
        (module / name).write_text(text)
    root.mkdir(parents=True, exist_ok=True)
    default = [{"library": "tiny", "arch": "sm_90a", "sources": ["tiny.cu"], "functions": ["answer"]}]
    build = {"schema": 1, "include": include or [], "records": records or default}
    (root / "build.json").write_text(json.dumps(build))
    return root
