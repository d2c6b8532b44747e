#!/usr/bin/env python3
"""Run the tests marked `gpu` on a machine that reaches no package registry.

On a machine with a registry (pip is enough, the other one's Python version is named):

    python3 tools/gpu_tests.py pack --wheels wheels --python 3.12 --also pytest-timeout==2.4.0

builds the wheels of every package here and downloads what the other machine lacks. Take the checkout and the
folder `wheels` along; there, with torch and pytest installed:

    python3 tools/gpu_tests.py run --wheels wheels --out gpu-out
    python3 tools/gpu_tests.py run --wheels wheels --out gpu-out --sanitize memcheck racecheck

`run` unpacks the wheels into a folder of its own, puts it on PYTHONPATH, runs `pytest -m gpu` and writes
junit.xml, pytest.log and summary.json into the output folder; with --sanitize also one log per tool of
NVIDIA's compute-sanitizer over a small case of every kernel (tools/sanitizer_case.py). Words after `--` go
to pytest. The exit status is 0 if everything asked for passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
# What the packages need at run time and a machine with torch and pytest may lack.
CARRIED = ["apache-tvm-ffi>=0.1.11,<0.2", "filelock", "packaging", "platformdirs", "rich"]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64"]
TESTS = ["packages", "kernels", "tests/ops", "tests/test_fsdp.py", "tests/test_kcp_gpus.py"]


def pack(args: argparse.Namespace) -> int:
    """Build cake's wheels and download the others for the Python named."""
    wheels: Path = args.wheels
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    say(f"building {', '.join(package.name for package in PACKAGES)}")
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(wheels), *map(str, PACKAGES)], check=True)
    wanted = [*CARRIED, *args.also]
    say(f"downloading {', '.join(wanted)} for Python {args.python}")
    target = [f"--python-version={args.python}", "--implementation=cp", "--only-binary=:all:"]
    target += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*pip, "download", "-q", "--no-deps", *target, "-d", str(wheels), *wanted], check=True)
    total = sum(path.stat().st_size for path in wheels.iterdir())
    say(f"{len(list(wheels.iterdir()))} wheels, {total / 2**20:.1f} MiB, in {wheels}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Unpack the wheels, run the tests, then the sanitizer's tools; write what happened."""
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"python": sys.version.split()[0], "host": platform.platform()}
    ok = True
    with tempfile.TemporaryDirectory(prefix="cake-gpu-") as scratch:
        environment = unpack(args.wheels, Path(scratch) / "site")
        summary["machine"] = describe(environment)
        say(json.dumps(summary["machine"]))
        if not args.no_tests:
            summary["tests"] = pytest(environment, out, args.pytest or TESTS)
            ok = summary["tests"]["exit"] == 0
        for tool in args.sanitize:
            summary[tool] = sanitize(environment, out, tool)
            ok = ok and summary[tool]["exit"] == 0
    summary["passed"] = ok
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(f"{'passed' if ok else 'FAILED'}; see {out / 'summary.json'}")
    return 0 if ok else 1


def unpack(wheels: Path, site: Path) -> dict[str, str]:
    """The environment in which the wheels of this folder can be imported."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"{wheels} holds no wheel: make them with `python3 tools/gpu_tests.py pack`")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, *map(str, files)], check=True)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def describe(environment: dict[str, str]) -> dict[str, Any]:
    """The GPU, torch's versions and those of the packages."""
    names = [package.name for package in PACKAGES]
    code = (
        "import json, torch\n"
        "from importlib.metadata import version\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None\n"
        f"versions = {{name: version(name) for name in {names!r}}}\n"
        "print(json.dumps({'gpu': gpu, 'torch': torch.__version__, 'cuda': torch.version.cuda, **versions}))"
    )
    answer = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    if found["gpu"] is None:
        raise SystemExit("torch finds no CUDA GPU on this machine: the tests marked gpu would all be skipped")
    return found


def pytest(environment: dict[str, str], out: Path, words: list[str]) -> dict[str, Any]:
    """Run the tests marked gpu; no test run at all counts as a failure."""
    junit = out / "junit.xml"
    junit.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        *words,
    ]
    result = logged(command, environment, out / "pytest.log")
    if junit.exists():
        suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
        for count in ("tests", "failures", "errors", "skipped"):
            result[count] = sum(int(suite.get(count, 0)) for suite in suites)
        cases = [case for suite in suites for case in suite.iter("testcase")]
        result["failed"] = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
        if result["tests"] == result["skipped"]:
            result["exit"] = result["exit"] or 5
    return result


def sanitize(environment: dict[str, str], out: Path, tool: str) -> dict[str, Any]:
    """One tool of compute-sanitizer over a small case of every kernel."""
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join([*map(str, homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if sanitizer is None:
        raise SystemExit(
            "compute-sanitizer was not found in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda/bin"
        )
    # Each tensor in an allocation of its own, so that a read past its end is seen.
    environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    case = [sys.executable, str(ROOT / "tools" / "sanitizer_case.py")]
    if tool == "racecheck":
        environment |= every_lane_arrives(out, path)
    subprocess.run(case, env=environment, check=True)  # compiles what is missing, outside the tool
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    result = logged([sanitizer, *options, *case], environment, out / f"{tool}.log")
    text = (out / f"{tool}.log").read_text()
    # racecheck says "RACECHECK SUMMARY: 0 hazards displayed", the others "ERROR SUMMARY: 0 errors".
    result["summary"] = [line.strip("= \n") for line in text.splitlines() if "SUMMARY" in line]
    if not result["summary"]:
        result["exit"] = result["exit"] or 1
    return result


def every_lane_arrives(out: Path, path: str) -> dict[str, str]:
    """The environment of a build for racecheck, kept apart from any other.

    The kernels let one lane arrive at an mbarrier for its warp, after __syncwarp; racecheck doesn't follow
    that order and would report each such pair. This build lets every lane arrive (cake/pipe.cuh).
    """
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is None:
        raise SystemExit("nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda/bin")
    folder = out / "racecheck"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    wrapper = folder / "bin" / "nvcc"
    # Its registers fall otherwise, and speed is no matter here: a spill is passed over.
    wrapper.write_text(
        f'#!/bin/sh\nsaid=$({nvcc} -DCAKE_EVERY_LANE_ARRIVES "$@" 2>&1)\nstatus=$?\n'
        "printf '%s\\n' \"$said\" | grep -v spill\nexit $status\n"
    )
    wrapper.chmod(0o755)
    return {"CAKE_NVCC": str(wrapper), "CAKE_CACHE_DIR": str(folder / "cache")}


def logged(command: list[str], environment: dict[str, str], log: Path) -> dict[str, Any]:
    """Run, show and keep the output."""
    say(" ".join(command))
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            file.write(line)
    return {"exit": process.wait(), "seconds": round(time.monotonic() - started, 1), "command": command}


def say(text: str) -> None:
    print(f"gpu_tests: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="fill a folder with wheels, where there is a registry")
    packing.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    packing.add_argument("--python", default="3.12", help="the other machine's Python, like 3.12")
    packing.add_argument("--also", nargs="*", default=[], help="more requirements to carry along")
    packing.set_defaults(do=pack)
    running = commands.add_parser("run", help="run the gpu tests from that folder, where there is a GPU")
    running.add_argument("--wheels", type=Path, default=ROOT / "wheels")
    running.add_argument("--out", type=Path, default=ROOT / "gpu-out")
    running.add_argument(
        "--sanitize", nargs="*", default=[], choices=["memcheck", "racecheck", "synccheck", "initcheck"]
    )
    running.add_argument("--no-tests", action="store_true", help="only what --sanitize names")
    running.add_argument("pytest", nargs="*", help="for pytest, after --")
    running.set_defaults(do=run)
    args = parser.parse_args()
    return int(args.do(args))


if __name__ == "__main__":
    raise SystemExit(main())
