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
    return parser


def run(args: argparse.Namespace) -> int:
    """Build; 0 where everything is in the cache afterwards, 1 where something failed."""
    from cake.core import _prebuild, cache, registry

    ops = args.op or [spec.name for spec in registry.ops()]
    if not ops:
        print("cake prebuild: no ops are installed (try: pip install cake-gdn)", file=sys.stderr)
        return 1
    try:
        archs = _prebuild.architectures(args.device, args.arch)
    except ValueError as error:
        print(f"cake prebuild: {error}", file=sys.stderr)
        return 2
    for op in ops:
        registry.op_spec(op)  # a misspelt name fails before anything is compiled
    for op in ops:
        if sys.stderr.isatty():
            _prebuild.prebuild(op, arch=archs, max_workers=args.jobs)
        else:
            _prebuild.build_all(op, archs, args.jobs, _line)
    print(cache.folder())
    return 0


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
