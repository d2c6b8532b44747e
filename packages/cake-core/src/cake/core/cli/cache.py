"""`cake cache`: show, clear, export or import the cache of compiled libraries."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cake.core.errors import CakeError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake cache``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cache",
        help="show, clear, export or import compiled libraries",
        description="The cache of compiled libraries: CAKE_CACHE_DIR, else the user's; "
        "CAKE_CACHE_READONLY_DIRS name more that are read.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="list the libraries: architecture, compiler, size, whether intact")
    info.add_argument(
        "--json", action="store_true", help="as JSON, with the registers and spills of each kernel"
    )
    clear = actions.add_parser("clear", help="remove them, and the sources kept from failed builds")
    clear.add_argument("--library", help="only this library's")
    export = actions.add_parser(
        "export",
        help="write the libraries of the ops into one file",
        description="Write everything that the ops run on an architecture into one file, out of the cache: "
        "`cake prebuild` first. The file serves machines with the same versions of the ops and of "
        "apache-tvm-ffi, which need neither nvcc nor g++.",
    )
    export.add_argument("file", metavar="FILE", help="like kernels-sm_90a.zip")
    export.add_argument("op", nargs="*", help="which ops; all that are installed if none is named")
    export.add_argument(
        "--arch", action="append", metavar="ARCH", required=True, help="like sm_90a; repeat it for more"
    )
    load = actions.add_parser(
        "import",
        help="check such a file and take its libraries into the cache",
        description="Check every byte of a file that `cake cache export` wrote, then publish its libraries. "
        "It holds native code: take it from whom you'd take a wheel.",
    )
    load.add_argument("file", metavar="FILE")
    load.add_argument("--sha256", metavar="HEX", help="refuse a file with another hash (export prints it)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it; 1 where a listed library is damaged, or an imported archive lacks what an installed op needs."""
    if args.action == "info":
        return _info(args.json)
    if args.action == "clear":
        return _clear(args.library)
    return _export(args) if args.action == "export" else _import(args)


def _export(args: argparse.Namespace) -> int:
    from pathlib import Path

    from cake.core import _archive, registry

    ops = args.op or [spec.name for spec in registry.ops() if spec.kernel_packages]
    if not ops:
        print("cake cache export: no ops are installed (try: pip install cake-gdn)", file=sys.stderr)
        return 1
    try:
        done = _archive.export_archive(Path(args.file), args.arch, ops)
    except ValueError as error:
        if isinstance(error, CakeError):
            raise
        print(f"cake cache export: {error}", file=sys.stderr)
        return 2
    print(f"{done.path}: {len(done.names)} libraries of {', '.join(ops)}, {_size(done.size)}")
    print(f"sha256 {done.sha256}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from pathlib import Path

    from cake.core import _archive, cache

    done = _archive.import_archive(Path(args.file), sha256=args.sha256)
    old = len(done.entries) - len(done.new)
    print(f"{len(done.new)} libraries are new in {cache.folder()}, {old} were there")
    missing = _archive.unready(done.ops, done.archs)
    if missing:
        print(
            f"cake cache import: the installed ops still lack {', '.join(missing)}: the file was made with "
            "other versions of them or of apache-tvm-ffi (see `cake cache info --json`)",
            file=sys.stderr,
        )
    return 1 if missing else 0


def _info(as_json: bool) -> int:
    from cake.core import cache

    root, *more = cache.folders()
    found = cache.entries()
    rows = [
        {
            "name": path.name,
            "folder": str(path.parent.parent),
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
        listing = {
            "folder": str(root),
            "readonly_folders": [str(folder) for folder in more],
            "libraries": rows,
        }
        print(json.dumps(listing, indent=2))
        return 1 if damaged else 0
    for folder in (root, *more):
        print(f"{folder}{'' if folder == root else ' (read-only)'}")
        here = [row for row in rows if row["folder"] == str(folder)]
        if here:
            _table(here)
        else:
            print("empty")
    for row in rows:
        if row["damage"]:
            print(f"{row['name']} is damaged and will be built again: {row['damage']}")
    if rows:
        print(f"{len(rows)} libraries, {_size(sum(row['bytes'] for row in rows))}")
    return 1 if damaged else 0


def _table(rows: list[dict[str, Any]]) -> None:
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


def _clear(library: str | None) -> int:
    from cake.core import cache

    count, size = cache.clear(library)
    print(f"removed {count} libraries, {_size(size)}, from {cache.folder()}")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
