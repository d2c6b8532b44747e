"""`cake ops`: the installed ops, their versions, kernels and entry points."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cake.core import provenance, registry

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ops",
        help="list the installed ops and their kernels",
        description="List the installed ops: version, variants, how each is selected, architectures.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def rows() -> list[dict[str, Any]]:
    """One dict per installed op, in the order of their names."""
    result = []
    for spec in registry.ops():
        packages = {p.name: provenance.package_record(p) for p in spec.kernel_packages}
        archs = sorted({arch for record in packages.values() for arch in record["archs"]})
        result.append(
            {
                "op": spec.name,
                "distribution": spec.distribution,
                "version": provenance.op_version(spec),
                "summary": spec.summary,
                "variants": list(spec.variants),
                "selected_by": None
                if spec.selection is None
                else f"--{spec.selection.option.replace('_', '-')} {spec.selection.value}",
                "archs": archs,
                "entry_points": dict(spec.entry_points),
                "flags": [f"--cake-{spec.name}-{flag.name}" for flag in spec.flags],
                "kernels": provenance.kernel_hash(spec, packages),
            }
        )
    return result


def run(args: argparse.Namespace) -> int:
    found = rows()
    broken = registry.broken()
    if args.json:
        print(json.dumps({"ops": found, "broken": {k: str(v) for k, v in broken.items()}}, indent=2))
        return 1 if broken else 0

    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not found and not broken:
        console.print("No op is installed. To get one: pip install cake-gdn", markup=False)
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("op", "version", "variants", "archs", "kernels", "selected by"):
        table.add_column(heading, overflow="fold")
    for row in found:
        kernels = row["kernels"]
        table.add_row(
            row["op"],
            row["version"] or "?",
            ", ".join(row["variants"]),
            ", ".join(row["archs"]) or "-",
            kernels.removeprefix("sha256:")[:12] if kernels else "-",
            row["selected_by"] or "configure()",
        )
    console.print(table)
    console.print()
    for row in found:
        console.print(f"{row['op']}: {row['summary'] or 'no description'}", markup=False)
    for name, error in broken.items():
        console.print(f"{name}: its declaration can't be used: {type(error).__name__}: {error}", markup=False)
    return 1 if broken else 0
