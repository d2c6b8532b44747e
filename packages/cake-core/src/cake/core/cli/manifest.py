"""`cake manifest`: what a run's bits depend on, as JSON for its log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cake.core import provenance
from cake.core.errors import ConfigError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "manifest",
        help="print versions and kernel hashes as JSON, for a run's log",
        description="Print versions, kernel hashes, compiler, architecture and variants as JSON.",
    )
    parser.add_argument("--compact", action="store_true", help="one line, for a log")
    parser.add_argument(
        "--require", metavar="FILE", help="a saved manifest: exit with 1 if an op's kernels are others now"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    if args.require is not None:
        try:
            saved = json.loads(Path(args.require).read_text(encoding="utf-8"))["ops"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{args.require} can't be read as a saved manifest: {error!r}") from error
        provenance.check_requirements(saved)
    found = provenance.manifest(probe=True)
    print(json.dumps(found, indent=None if args.compact else 2, sort_keys=False))
    return 0
