"""`cake vendor`: copy kernel sources into an op, and check the copies."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake vendor``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "vendor",
        help="copy kernel sources into an op, and check the copies",
        description="Keep the frozen copies of kernel sources in an op's _vendor folder.",
    )
    forms = parser.add_subparsers(dest="form", metavar="FORM", required=True)
    own = forms.add_parser("self", help="copy this repository's kernels/ into an op of it")
    own.add_argument("op", help="the op, as in packages/cake-<op>")
    own.add_argument("packages", nargs="*", help="folders of kernels/ to copy besides kernels/include")
    own.add_argument("--commit", metavar="REV", help="copy from this commit; HEAD if not given")
    own.add_argument(
        "--repo", type=Path, help="the checkout; the one around the working directory if not given"
    )
    check = forms.add_parser("check", help="compare the copies with VENDORED.json; 1 where one differs")
    check.add_argument("op", nargs="*", help="which ops; all if none is named")
    check.add_argument(
        "--repo", type=Path, help="look in this checkout, else around here, else what is installed"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it; 1 where a copy can't be made or isn't what the table says."""
    from cake.core import vendor

    repo = args.repo.absolute() if args.repo is not None else vendor.repository()
    if args.form == "self":
        if repo is None:
            print(
                "cake vendor: no checkout with kernels/ and packages/ around here; say --repo",
                file=sys.stderr,
            )
            return 2
        copied = vendor.vendor_self(args.op, repo, args.commit, args.packages)
        done = "copied" if copied.changed else "up to date:"
        print(f"{done} {', '.join(copied.packages)} at {copied.commit[:12]} in {copied.folder}")
        return 0
    wrong = vendor.check(args.op, repo)
    for op, sentences in wrong.items():
        for sentence in sentences:
            print(f"{op}: {sentence}")
        if not sentences:
            print(f"{op}: ok")
    return 1 if any(wrong.values()) else 0
