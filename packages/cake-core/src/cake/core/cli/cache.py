"""`cake cache`: show or clear the cache of compiled libraries."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake cache``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cache",
        help="show or clear the cache of compiled libraries",
        description="Show or clear the cache of compiled libraries: CAKE_CACHE_DIR, else the user's.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="list the libraries: architecture, compiler, size, whether intact")
    info.add_argument(
        "--json", action="store_true", help="as JSON, with the registers and spills of each kernel"
    )
    clear = actions.add_parser("clear", help="remove them, and the sources kept from failed builds")
    clear.add_argument("--library", help="only this library's")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it; 1 where a listed library is damaged."""
    return _info(args.json) if args.action == "info" else _clear(args.library)


def _info(as_json: bool) -> int:
    from cake.core import cache

    root = cache.folder()
    found = cache.entries()
    rows = [
        {
            "name": path.name,
            "library": entry.meta["library"] if entry else path.name.rpartition("-")[0],
            "arch": entry.meta.get("arch", "") if entry else "",
            "nvcc": entry.meta.get("nvcc", {}).get("version", "") if entry else "",
            "built": entry.meta.get("built", "") if entry else "",
            "bytes": cache.size_of(path),
            "damage": why,
            "kernels": entry.meta.get("kernels", []) if entry else [],
        }
        for path, entry, why in found
    ]
    damaged = sum(1 for row in rows if row["damage"])
    if as_json:
        print(json.dumps({"folder": str(root), "libraries": rows}, indent=2))
        return 1 if damaged else 0
    print(f"{root}")
    if not rows:
        print("empty")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("library", "arch", "nvcc", "built", "size", "state"):
        table.add_column(
            heading, justify="right" if heading == "size" else "left", no_wrap=heading != "state"
        )
    for row in rows:
        state = "damaged" if row["damage"] else "ok"
        table.add_row(row["name"], row["arch"], row["nvcc"], row["built"], _size(row["bytes"]), state)
    Console(highlight=False).print(table)
    for row in rows:
        if row["damage"]:
            print(f"{row['name']} is damaged and will be built again: {row['damage']}")
    print(f"{len(rows)} libraries, {_size(sum(row['bytes'] for row in rows))}")
    return 1 if damaged else 0


def _clear(library: str | None) -> int:
    from cake.core import cache

    count, size = cache.clear(library)
    print(f"removed {count} libraries, {_size(size)}, from {cache.folder()}")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
