"""`cake doctor`: what is installed and configured here, which source won, and what would stop a run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cake.core import _report

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say what is installed and configured, and what would stop a run",
        description="Say what is installed and configured, which source won, and what would stop a run. "
        "Exit status 1 if something would.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    report = _report.collect()
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
        return 0 if report.ok else 1

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=False)
    for title, rows in report.sections.items():
        console.print(title, style="bold")
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
    console.print()
    for finding in sorted(report.findings, key=lambda finding: not finding.stops):
        mark, style = ("STOPS A RUN", "bold red") if finding.stops else ("note", "yellow")
        console.print(f"{mark}:", style=style, end=" ")
        console.print(finding.text, markup=False)
    if report.ok:
        console.print("Nothing found that would stop a run.", style="green")
    return 0 if report.ok else 1
