"""`cake prebuild`: compile everything an op can need, before it is needed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake prebuild``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prebuild",
        help="compile everything an op can need, before it is needed",
        description="Compile every library of the ops into the cache. Needs no GPU when --arch is given.",
    )
    parser.add_argument("op", nargs="*", help="which ops; all that are installed if none is named")
    parser.add_argument(
        "--arch", action="append", metavar="ARCH", help="like sm_90a, 90a or 9.0; repeat it for more than one"
    )
    parser.add_argument("--device", help="build for this CUDA device, like cuda:0")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilers at once (CAKE_JOBS, MAX_JOBS, else CPUs)"
    )
    parser.add_argument(
        "--list", action="store_true", help="build nothing: say what is served on which architecture"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Build; 0 where everything is in the cache afterwards, 1 where something failed or isn't served."""
    from cake.core import _prebuild, _served, cache, registry, toolchain

    ops = args.op or [spec.name for spec in registry.ops() if args.list or spec.kernel_packages]
    if not ops:
        print("cake prebuild: no ops are installed (try: pip install cake-gdn)", file=sys.stderr)
        return 1
    try:
        if args.list and args.arch is None and args.device is None:
            archs = tuple(toolchain.MIN_CUDA)
        else:
            archs = _prebuild.architectures(args.device, args.arch)
    except ValueError as error:
        print(f"cake prebuild: {error}", file=sys.stderr)
        return 2
    # A misspelt name and what nobody serves are said before anything is compiled.
    rows = [_served.served(op, arch) for op in ops for arch in archs]
    if args.list:
        for arch in archs:
            print(_served.compiler(arch))
            for row in rows:
                if row.arch == arch:
                    print(f"  {row.sentence}")
        print(_served.OTHERWISE)
        return 0
    partial = [row.sentence for row in rows if not row.packages or row.lacking]
    for sentence in [*partial, _served.OTHERWISE] if partial else ():
        print(f"cake prebuild: {sentence}", file=sys.stderr)
    for op in ops:
        wanted = tuple(row.arch for row in rows if row.op == op and row.packages)
        if not wanted:
            continue
        if sys.stderr.isatty():
            _prebuild.prebuild(op, arch=wanted, max_workers=args.jobs)
        else:
            _prebuild.build_all(op, wanted, args.jobs, _line)
    print(cache.folder())
    return 0 if all(row.packages for row in rows) else 1


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
