"""The compatibility matrix: every version of every op, against every cake-core that its bounds accept.

python3 -m nox -s compat                 all pairs
python3 -m nox -s compat -- --tree-only  the pairs in which the working tree takes part (what CI runs)
python3 -m nox -s compat -- --op gdn     one op's

Released versions are built from their commits (releases.toml), the working tree from what lies in it. A pair
is installed from wheels into an environment of its own by pip's resolver, and the tests of the op's own sdist
run there, on the CPU, with those of every op's contract (tests/ops) as they were at the op's commit. A pair
outside the bounds has to be refused by the resolver; so does every op with a core 99.0.0, so that a refusal
is always among what is tested. Torch and the other requirements are installed once and shared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compat_pairs import BEYOND, CONTRACT, TREE, Pair, Stage, pairs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from release_build import Built, build_release, build_worktree
from release_checks import CORE
from release_record import Release, ReleaseError, export, export_worktree, has_object, packages, read, unpack

MARKS = "not gpu and not nvcc and not slow"
TESTING = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "numpy")
REFUSALS = ("ResolutionImpossible", "conflicting dependencies")


@dataclass(frozen=True)
class Result:
    """How a pair fared: one word, one sentence, seconds."""

    pair: Pair
    ok: bool
    word: str
    text: str
    seconds: float


def run(
    *command: str | Path, cwd: Path, seconds: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run it with nothing of this process's Python or cake settings; both output streams come back as one."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CAKE_", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def must(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode != 0:
        raise ReleaseError(f"{what} failed:\n{done.stdout}")


# ---- what is built


def stages(repo: Path, house: Path, distribution: str) -> Iterator[Stage]:
    """The released versions of a distribution, oldest first, then the working tree's."""
    for version, release in read(repo).get(distribution, {}).items():
        folder = house / f"{distribution}-{version}-{release.tree[:12]}"
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=house) as scratch:
                _, origin = build_release(repo, distribution, version, release, Path(scratch, "files"))
                Path(scratch, "files").rename(folder)
            print(f"built {distribution} {version} from its {origin}", flush=True)
        yield Stage(distribution, version, _built(folder), _contract(repo, folder, release))
    if distribution in packages(repo):
        contract = house / f"{distribution}-{TREE}-contract"
        shutil.rmtree(contract, ignore_errors=True)
        export_worktree(repo, CONTRACT, contract)
        built = _of_tree(repo, house, distribution, TREE)
        yield Stage(distribution, TREE, built, contract if contract.is_dir() else None)


def _contract(repo: Path, built: Path, release: Release) -> Path | None:
    """The tests of every op's contract at a release's commit. None before there were any, and where this
    clone doesn't hold that commit: they are no part of the release."""
    folder = built.with_name(f"{built.name}-contract")
    if not folder.is_dir() and not has_object(repo, release.commit):
        print(f"{built.name}: this clone lacks its commit, so the tests of its sdist alone", flush=True)
    if not folder.is_dir() and has_object(repo, f"{release.commit}:{CONTRACT}"):
        export(repo, f"{release.commit}:{CONTRACT}", folder)
    return folder if folder.is_dir() else None


def _of_tree(repo: Path, house: Path, distribution: str, label: str) -> Built:
    folder = house / f"{distribution}-{label}"
    shutil.rmtree(folder, ignore_errors=True)
    return build_worktree(repo, distribution, folder, None if label == TREE else label)


def _built(folder: Path) -> Built:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return Built(sdist, wheel)


# ---- environments


class Base:
    """An environment with everything that the wheels require but cake itself; pairs see what is in it."""

    def __init__(self, folder: Path, torch: str, wheels: list[Stage]) -> None:
        self.folder = folder
        wanted = {torch, *TESTING}
        for stage in wheels:
            for text in stage.requirements:
                requirement = Requirement(text)
                ours = canonicalize_name(requirement.name).startswith("cake-")
                if not ours and "extra" not in str(requirement.marker or ""):
                    wanted.add(text)
        stamp, request = folder / "installed", "\n".join(sorted(wanted))
        if not stamp.exists() or stamp.read_text() != request:
            shutil.rmtree(folder, ignore_errors=True)
            make_environment(folder)
            print(f"installing {', '.join(sorted(wanted))}", flush=True)
            done = run(folder / "bin/python", "-m", "pip", "install", "-q", *sorted(wanted), cwd=folder)
            must(done, "installing what the wheels require")
            stamp.write_text(request)
        (self.site,) = folder.glob("lib/python*/site-packages")


def make_environment(folder: Path) -> None:
    must(run(sys.executable, "-m", "virtualenv", "-q", "--clear", folder, cwd=folder.parent), "virtualenv")


def environment(folder: Path, base: Base) -> Path:
    """A fresh environment that sees the base's packages; returns its Python."""
    make_environment(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{base.site}\n")
    return folder / "bin/python"


# ---- a pair


def try_pair(pair: Pair, base: Base, scratch: Path, minutes: float, words: list[str]) -> Result:
    """Install the pair, and run the op's tests where it may be installed."""
    begin = time.monotonic()

    def result(ok: bool, word: str, text: str) -> Result:
        return Result(pair, ok, word, text, time.monotonic() - begin)

    python = environment(scratch / "environment", base)
    wheels = (pair.core.built.wheel, pair.op.built.wheel)
    if not pair.allowed:
        done = run(python, "-m", "pip", "install", "--dry-run", "--no-index", *wheels, cwd=scratch)
        if done.returncode != 0 and any(text in done.stdout for text in REFUSALS):
            return result(True, "refused", "outside the bounds")
        return result(False, "NOT REFUSED", f"pip took a pair outside the bounds\n{done.stdout}")
    done = run(python, "-m", "pip", "install", "-q", "--no-index", *wheels, cwd=scratch)
    if done.returncode != 0:
        return result(False, "NO INSTALL", done.stdout)
    done = run(python, "-m", "pip", "check", cwd=scratch)
    if done.returncode != 0:
        return result(False, "NO INSTALL", done.stdout)
    # As they lie in the repository.
    source, unpacked = scratch / "source", scratch / "source" / "packages" / pair.op.distribution
    with tarfile.open(pair.op.built.sdist) as sdist:
        unpack(sdist, source)
    unpacked.parent.mkdir()
    next(path for path in source.iterdir() if path != unpacked.parent).rename(unpacked)
    shutil.rmtree(unpacked / "src")  # the installed wheel, or nothing
    tests: list[str | Path] = ["tests"]
    if pair.op.contract is not None:
        tests.append(shutil.copytree(pair.op.contract, source / CONTRACT))
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])
    command = [python, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-m", MARKS]
    try:
        done = run(
            *command,
            "--timeout=300",
            *words,
            *tests,
            cwd=unpacked,
            seconds=60 * minutes,
            PATH=path,
            OMP_NUM_THREADS="1",
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        told = output.decode(errors="replace") if isinstance(output, bytes) else output
        return result(False, "TOO LONG", f"no end after {minutes:g} minutes\n{told}")
    last = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout.strip() else "no output"
    if done.returncode != 0:
        return result(False, "FAILED", done.stdout)
    return result(True, "passed", last)


def table(results: list[Result]) -> str:
    """The matrix: one line per pair."""
    rows = [("op", "version", "cake-core", "result", "seconds", "")]
    for r in results:
        text = r.text.splitlines()[0] if r.text else ""
        if not r.ok and r.word == "FAILED":
            text = r.text.strip().splitlines()[-1].strip("= ")
        rows.append(
            (r.pair.op.distribution, str(r.pair.op), str(r.pair.core), r.word, f"{r.seconds:.0f}", text)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--repo", type=Path, default=root, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to build and install; .nox/matrix")
    parser.add_argument("--torch", default="torch", help="the requirement of torch, like torch==2.13.0")
    parser.add_argument(
        "--op", action="append", metavar="OP", help="only this op's pairs; repeat it for more"
    )
    parser.add_argument("--tree-only", action="store_true", help="only pairs with the working tree")
    parser.add_argument("--minutes", type=float, default=10.0, help="what the tests of one pair may take")
    parser.add_argument("words", nargs="*", metavar="-- WORD", help="more words for pytest, like -n 2")
    args = parser.parse_args(argv)
    folder = args.folder or args.repo / ".nox" / "matrix"
    house = folder / "house"
    house.mkdir(parents=True, exist_ok=True)
    try:
        wanted = [f"cake-{op}" for op in args.op or []]
        distributions = packages(args.repo)
        unknown = [name for name in wanted if name not in distributions]
        if unknown:
            raise ReleaseError(f"no {', '.join(unknown)} here; there are: {', '.join(distributions)}")
        cores = list(stages(args.repo, house, CORE))
        beyond = Stage(CORE, BEYOND, _of_tree(args.repo, house, CORE, BEYOND))
        ops = [
            stage
            for name in distributions
            if name != CORE and (not wanted or name in wanted)
            for stage in stages(args.repo, house, name)
        ]
        plan = pairs(ops, [*cores, beyond], tree_only=args.tree_only)
        base = Base(
            folder / f"base-{sys.version_info.major}.{sys.version_info.minor}", args.torch, [*cores, *ops]
        )
        results = []
        for pair in plan:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                result = try_pair(pair, base, Path(scratch), args.minutes, args.words)
            results.append(result)
            named = f"{pair.op.distribution} {pair.op} with {CORE} {pair.core}"
            print(f"{named}: {result.word} ({result.seconds:.0f} s)", flush=True)
            if not result.ok:
                print(result.text, flush=True)
    except ReleaseError as error:
        print(f"compat: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(results)}")
    bad = sum(not result.ok for result in results)
    print(
        f"\n{len(results)} pairs, {bad} not as they must be"
        if bad
        else f"\n{len(results)} pairs, all as they must be"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
