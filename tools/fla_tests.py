#!/usr/bin/env python3
"""Run flash-linear-attention's own tests of an op's function through cake, and count what becomes of them.

    python3 tools/fla_tests.py --out results.json               # fetches the tests of the installed version
    python3 tools/fla_tests.py path/to/checkout --out results.json -- -n 8

Its sdists hold no tests: they come from a checkout, from an archive of one (.tar.gz), or from the archive
that GitHub makes of the tag. Needs flash-linear-attention, pytest and a GPU. Words after `--` go to pytest.

A test counts if it calls the function. It is
  passed    if cake served every call and the test passed,
  refused   if cake handed a call back to flash-linear-attention: the test ends there, with cake's reason,
  failed    if cake served every call so far and the test failed,
  skipped   if it skips itself on this machine.
Nearly all of them are written for float16, which cake doesn't serve, so they run twice: as they are, and with
bfloat16 in its place (tolerances as they are). What failed runs again without cake, to tell whose fault it
is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

ARCHIVE = "https://github.com/fla-org/flash-linear-attention/archive/refs/tags/v{version}.tar.gz"
#: By op: its function there, and where its tests are.
OPS = {"gdn": ("chunk_gated_delta_rule", "test_gdn.py"), "kda": ("chunk_kda", "test_kda.py")}
RUNS = {"as written": {}, "bfloat16 for float16": {"torch.float16": "torch.bfloat16"}}
OUTCOMES = ("passed", "refused", "failed", "skipped")
#: Named in the environment of pytest: where the plugin below writes what it saw.
SEEN = "CAKE_FLA_TESTS_SEEN"
#: Named there too where the tests are to run without cake.
PLAIN = "CAKE_FLA_TESTS_PLAIN"


@contextmanager
def sources(given: str | None) -> Iterator[Path]:
    """The folder tests/ops of flash-linear-attention."""
    with tempfile.TemporaryDirectory(prefix="cake-fla-") as name:
        folder = Path(name)
        if given is None:
            url = ARCHIVE.format(version=metadata.version("flash-linear-attention"))
            given = str(folder / "archive.tar.gz")
            with urllib.request.urlopen(url, timeout=60) as answer, Path(given).open("wb") as file:
                shutil.copyfileobj(answer, file)
        root = Path(given)
        if root.is_file():
            with tarfile.open(root) as archive:
                archive.extractall(folder / "unpacked", filter="data")
            root = folder / "unpacked"
        found = [path.parent for path in root.rglob(OPS["gdn"][1]) if path.parent.name == "ops"]
        if not found:
            raise SystemExit(f"{given} holds no tests/ops/{OPS['gdn'][1]}: name a checkout or its archive")
        yield found[0]


def run(ops_folder: Path, replace: dict[str, str], words: list[str]) -> Iterator[dict[str, Any]]:
    """One run of pytest over copies of the tests; counts by op, reasons of refusals, and failures.

    Given once before what failed runs again without cake, and once after.
    """
    with tempfile.TemporaryDirectory(prefix="cake-fla-run-") as name:
        folder = Path(name)
        files = [file for _, file in OPS.values() if (ops_folder / file).exists()]
        for file in [*files, "conftest.py"]:
            if (ops_folder / file).exists():
                text = (ops_folder / file).read_text()
                for old, new in replace.items():
                    text = text.replace(old, new)
                (folder / file).write_text(text)
        tests = outcomes_in(folder, [*words, *files])
        results = {op: counted(tests, file) for op, (_, file) in OPS.items() if file in files}
        yield results
        failed = [name for found in results.values() for name in found["failures"]]
        if failed:
            alone = {test["name"]: test for test in outcomes_in(folder, [*words, *failed], **{PLAIN: "1"})}
            for found in results.values():
                for name, failure in found["failures"].items():
                    words = [alone[name]["outcome"], alone[name]["reason"]]
                    failure["without cake"] = " ".join(filter(None, words))
            yield results


def outcomes_in(folder: Path, words: list[str], **more: str) -> list[dict[str, Any]]:
    """What became of the tests there."""
    seen = folder / "seen.json"
    seen.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, SEEN: str(seen), "FLA_FLASH_QLA": "0", **more}
    environment.pop("PYTEST_XDIST_WORKER", None)  # whoever runs this may be one; the pytest here isn't
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fla_tests", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), *words]
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    if not seen.exists():
        raise SystemExit(f"pytest ended with status {done.returncode} and no results")
    found: list[dict[str, Any]] = json.loads(seen.read_text())
    return found


def counted(tests: list[dict[str, Any]], file: str) -> dict[str, Any]:
    """Counts, reasons and failures of one file's tests."""
    mine = [test for test in tests if test["name"].split("::")[0].endswith(file)]
    counts = Counter(test["outcome"] for test in mine)
    reasons = Counter(test["reason"] for test in mine if test["outcome"] == "refused")
    return {
        "tests": len(mine),
        **{outcome: counts.get(outcome, 0) for outcome in OUTCOMES},
        "reasons": dict(reasons.most_common()),
        "failures": {test["name"]: {"why": test["reason"]} for test in mine if test["outcome"] == "failed"},
    }


def outcome(report: dict[str, str], seen: dict[str, Any]) -> tuple[str, str]:
    """What a test counts as, and why, from pytest's report and what cake did in it."""
    if seen["refused"]:
        return "refused", seen["refused"][0]
    if report["outcome"] == "skipped":
        return "skipped", report["why"]
    return report["outcome"], report["why"]


# ---- the plugin of pytest ------------------------------------------------------------------------------

_calls: dict[str, Any] = {}


def pytest_configure(config: Any) -> None:
    """Registers cake, and has every call noted; a call that it hands back ends the test."""
    if SEEN not in os.environ:
        return
    import pytest

    from cake.core import fla

    config.addinivalue_line("markers", "smoke: one of flash-linear-attention's")
    if PLAIN in os.environ:
        return
    make = fla._backend

    def noted(adapter: Any, base: Any, plain: Any) -> Any:
        made = make(adapter, base, plain)
        verify = getattr(made, f"{adapter.function}_verifier")
        serve = getattr(made, adapter.function)

        def verifier(self: Any, *args: Any, **kwargs: Any) -> Any:
            served, reason = verify(self, *args, **kwargs)
            if not served:
                _calls["refused"].append(reason)
                pytest.skip(f"refused: {reason}")
            return served, reason

        def function(self: Any, *args: Any, **kwargs: Any) -> Any:
            _calls["served"] += 1
            return serve(self, *args, **kwargs)

        setattr(made, f"{adapter.function}_verifier", verifier)
        setattr(made, adapter.function, function)
        return made

    fla._backend = noted
    fla.register_ops()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out the tests that don't call the function."""
    if SEEN not in os.environ:
        return
    import inspect

    functions = {file: function for function, file in OPS.values()}
    kept = [
        item
        for item in items
        if f"{functions[Path(str(item.path)).name]}(" in inspect.getsource(item.function)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_setup(item: Any) -> None:
    """Nothing is noted yet."""
    _calls.update(served=0, refused=[])


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Hands what was noted to the report, which travels from a worker to the controller."""
    if SEEN in os.environ and call.when == "call":
        item.user_properties.append(("cake", dict(_calls)))


def pytest_runtest_logreport(report: Any) -> None:
    """Collects the results; only the controller of several workers, or the only process, has them all."""
    if SEEN not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.outcome == "passed":
        return
    seen = dict(report.user_properties).get("cake", {"served": 0, "refused": []})
    why = ""
    if report.outcome == "skipped":
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()[0]
    found, reason = outcome({"outcome": report.outcome, "why": why}, seen)
    _tests.append({"name": report.nodeid, "outcome": found, "reason": reason, "served": seen["served"]})


_tests: list[dict[str, Any]] = []


def pytest_sessionfinish(session: Any) -> None:
    """Writes the results."""
    if SEEN in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        Path(os.environ[SEEN]).write_text(json.dumps(_tests))


# ---- the command ---------------------------------------------------------------------------------------


def table(runs: dict[str, Any]) -> str:
    lines = [f"{'run':24}{'op':6}" + "".join(f"{name:>9}" for name in ("tests", *OUTCOMES))]
    for name, ops in runs.items():
        for op, found in ops.items():
            lines.append(f"{name:24}{op:6}" + "".join(f"{found[key]:>9}" for key in ("tests", *OUTCOMES)))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="a checkout of flash-linear-attention, or its .tar.gz")
    parser.add_argument("--revision", help="what the source is, for the results")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--commit", help="cake's, recorded where the sources are no git checkout")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, words = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    runs: dict[str, Any] = {}
    with sources(args.source) as folder:
        for name, replace in RUNS.items():
            for runs[name] in run(folder, replace, words):
                write(args, runs)  # what there is, should the rest take too long
    print(table(runs))
    for name, ops in runs.items():
        for op, found in ops.items():
            for reason, count in found["reasons"].items():
                print(f"{name}, {op}: refused {count}: {reason}")
            for test, failure in found["failures"].items():
                print(f"{name}, {op}: failed: {test}: {failure['why']}")
                print(f"  without cake: {failure['without cake']}")
    return 1 if any(found["failed"] for ops in runs.values() for found in ops.values()) else 0


def write(args: argparse.Namespace, runs: dict[str, Any]) -> None:
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"header": header(args), "runs": runs}, indent=1) + "\n")


def header(args: argparse.Namespace) -> dict[str, Any]:
    import datetime

    import torch

    from cake.core.bench import git_commit

    names = ("flash-linear-attention", "fla-core", "cake-core", "cake-gdn", "cake-kda", "torch", "triton")
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: metadata.version(name) for name in names},
        "source": args.revision or ARCHIVE.format(version=metadata.version("flash-linear-attention")),
        "commit": args.commit or git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())
