"""`cake manifest`: what a run's bits depend on, as JSON for its log."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cake.core import provenance

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "manifest",
        help="print versions and kernel hashes as JSON, for a run's log",
        description="Print versions, kernel hashes, compiler, architecture and variants as JSON.",
    )
    parser.add_argument("--compact", action="store_true", help="one line, for a log")
    return parser


def run(args: argparse.Namespace) -> int:
    found = provenance.manifest(probe=True)
    print(json.dumps(found, indent=None if args.compact else 2, sort_keys=False))
    return 0
