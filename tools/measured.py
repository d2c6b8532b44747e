#!/usr/bin/env python3
"""Write the measured tables and pictures of README.md and docs from the committed results, or check them.

    python3 tools/measured.py            # rewrite them; pictures need cake-core[chart]
    python3 tools/measured.py --check    # exit 1 where a table or a picture isn't what its results say

A table stands between `<!-- measured NAME -->` and `<!-- /measured -->`; the names are the keys of TABLES. A
picture holds the hash of the results that it was drawn from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GDN = ROOT / "packages" / "cake-gdn" / "benchmarks" / "results" / "h200.json"
KDA = ROOT / "packages" / "cake-kda" / "benchmarks" / "results" / "h200.json"
MERGE = ROOT / "packages" / "cake-core" / "benchmarks" / "results" / "h200-merge.json"
FLA_TESTS = ROOT / "packages" / "cake-core" / "benchmarks" / "results" / "fla-tests.json"
MARK = re.compile(r"<!-- measured (\S+) -->\n.*?<!-- /measured -->", re.DOTALL)
# Part of a kernel's name: what the documents call it.
STAGES = {
    "prep_kernel": "prep",
    "scan_kernel": "scan, with the tape",
    "adj_kernel": "adj",
    "out_kernel": "out",
}


def rows(results: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The result rows whose fields are as wanted."""
    found: list[dict[str, Any]] = results["rows"]
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def cell(results: dict[str, Any], field: str, digits: int = 2, **wanted: Any) -> str:
    """One figure, or a dash where it was not measured."""
    found = rows(results, **wanted)
    value = found[0].get(field) if found else None
    return "–" if value is None else f"{value:.{digits}f}"


def documents_of(lengths: list[int]) -> str:
    """The lengths of a pack, in a table's words."""
    if len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    if len(lengths) > 5:
        return f"{len(lengths)} of {min(lengths)} to {max(lengths)}"
    return " + ".join(map(str, lengths))


def shapes(results: dict[str, Any], arm: str, title: str) -> str:
    """Forward and forward with backward of every shape, det, beside another library."""
    gates = any(name.endswith("-free") for name in (row["shape"] for row in results["rows"]))
    lines = [
        f"| heads (H, HV) | tokens of the documents |{' gate |' if gates else ''} fwd | fwd+bwd | recomputed "
        f"| wall | {title} fwd | fwd+bwd | wall |",
        "|---|---|---|---|---|---|---|---|---|" + "---|" * gates,
    ]
    for name in dict.fromkeys(row["shape"] for row in results["rows"]):
        first = rows(results, shape=name)[0]
        peer = {"shape": name, "arm": arm}
        words = [f"({first['heads'][0]}, {first['heads'][1]})", documents_of(first["lengths"])]
        if gates:
            words.append("unbounded" if name.endswith("-free") else "at least -5")
        figures = [
            *ours(results, name),
            cell(results, "wall_ms", shape=name, arm="cake-det", mode="save", **{"pass": "fwd+bwd"}),
            cell(results, "gpu_ms", **peer, **{"pass": "fwd"}),
            cell(results, "gpu_ms", **peer, **{"pass": "fwd+bwd"}),
            cell(results, "wall_ms", **peer, **{"pass": "fwd+bwd"}),
        ]
        lines.append(f"| {' | '.join([*words, *figures])} |")
    return "\n".join(lines)


def ours(results: dict[str, Any], shape: str) -> list[str]:
    """GPU time of det: forward, forward with backward, and that with the states recomputed."""
    det = {"shape": shape, "arm": "cake-det"}
    return [
        cell(results, "gpu_ms", **det, **{"pass": "fwd"}),
        *(cell(results, "gpu_ms", **det, mode=mode, **{"pass": "fwd+bwd"}) for mode in ("save", "recompute")),
    ]


def stages(results: dict[str, Any], shape: str = "M") -> str:
    """Each kernel's time on one shape, and what it reaches of the rates of a copy and of a matrix product."""
    first = rows(results, shape=shape)[0]
    where = f"({first['heads'][0]}, {first['heads'][1]}), {documents_of(first['lengths'])} tokens"
    lines = [f"| kernel | ms on {where} | of the copy's rate | of the product's |", "|---|---|---|---|"]
    for part, title in STAGES.items():
        for row in results["kernels"]:
            here = (row["shape"], row["arm"], row["pass"], row["mode"])
            if here == (shape, "cake-det", "fwd+bwd", "save") and part in row["name"]:
                reached = f"{row['of_copy']:.0%} | {row['of_matmul']:.0%}"
                lines.append(f"| {title} | {row['gpu_ms'] / row['calls']:.2f} | {reached} |")
    return "\n".join(lines)


def segments(results: dict[str, Any]) -> str:
    """Shapes that are cut into segments, beside FlashQLA, which cuts them too."""
    lines = [
        "| heads (H, HV) | tokens of the documents | fwd+bwd | FlashQLA |",
        "|---|---|---|---|",
    ]
    names = (
        "h2v8-1x32768",
        "h16v32-1x32768",
        "h16v32-1x8192",
        "h16v64-1x32768",
        "h16v32-4random",
        "h4v12-rl",
    )
    for name in names:
        first = rows(results, shape=name)[0]
        wanted = {"shape": name, "pass": "fwd+bwd"}
        own = cell(results, "gpu_ms", arm="cake-det", mode="save", **wanted)
        figures = f"{own} | {cell(results, 'gpu_ms', arm='flashqla', **wanted)}"
        heads = f"({first['heads'][0]}, {first['heads'][1]})"
        lines.append(f"| {heads} | {documents_of(first['lengths'])} | {figures} |")
    return "\n".join(lines)


def memory(results: dict[str, Any]) -> str:
    """What a forward on shape M saves and what a forward and backward needs at most, in bytes per token."""
    lines = [
        "| on (16, 48), 32768 tokens | saved, KiB a token | peak of fwd+bwd, KiB a token |",
        "|---|---|---|",
    ]
    for title, arm, mode in (
        ("cake, states saved", "cake-det", "save"),
        ("cake, recomputed", "cake-det", "recompute"),
        ("FlashQLA", "flashqla", None),
    ):
        wanted = {"shape": "M", "arm": arm, "mode": mode}
        figures = []
        for field, name in (("saved_bytes", "fwd_train"), ("peak_bytes", "fwd+bwd")):
            row = rows(results, **wanted, **{"pass": name})[0]
            figures.append(f"{row[field] / sum(row['lengths']) / 1024:.1f}")
        lines.append(f"| {title} | {' | '.join(figures)} |")
    return "\n".join(lines)


def repeat(results: dict[str, Any]) -> str:
    """The same documents with grouped heads, and with q and k repeated to the heads of v."""
    lines = ["| (H, HV) | fwd, ms | fwd+bwd, ms |", "|---|---|---|"]
    for shape in ("M", "M-repeated"):
        heads = rows(results, shape=shape)[0]["heads"]
        det = {"shape": shape, "arm": "cake-det"}
        figures = [
            cell(results, "gpu_ms", **det, **{"pass": "fwd"}),
            cell(results, "gpu_ms", **det, mode="save", **{"pass": "fwd+bwd"}),
        ]
        lines.append(f"| ({heads[0]}, {heads[1]}) | {' | '.join(figures)} |")
    return "\n".join(lines)


def ranks(results: dict[str, Any]) -> str:
    """Packs over several GPUs beside one, det with the tape saved, and whichever library ran beside it."""
    titles = {"cake-det": "cake", "flashqla": "FlashQLA", "fla": "FLA"}
    arms = dict.fromkeys(row["arm"].split(" x")[0] for row in results["rows"] if row["arm"] != "floor")
    lines = [
        "| heads (H, HV) | tokens of the documents | library | GPUs | layout | fwd, wall | fwd+bwd, GPU "
        "| wall | one GPU's wall over it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in product(dict.fromkeys(row["shape"] for row in results["rows"]), arms):
        here = {"shape": name, "mode": "save" if arm == "cake-det" else None, "pass": "fwd+bwd"}
        alone = rows(results, **here, world_size=1, arm=arm)[0]
        for row in [alone, *(x for x in rows(results, **here) if x["arm"].startswith(f"{arm} x"))]:
            figures = [
                cell(results, "wall_ms", shape=name, arm=row["arm"], **{"pass": "fwd"}),
                *(cell(results, field, **here, arm=row["arm"]) for field in ("gpu_ms", "wall_ms")),
                f"{alone['wall_ms'] / row['wall_ms']:.2f}",
            ]
            heads = f"({row['heads'][0]}, {row['heads'][1]})"
            where = f"{titles[arm]} | {row['world_size']} | {row['layout'] or ''}"
            lines.append(f"| {heads} | {documents_of(row['lengths'])} | {where} | {' | '.join(figures)} |")
    return "\n".join(lines)


def merge(results: dict[str, Any]) -> str:
    """The merge of maps: the fastest build at each load, mean of both directions."""
    lines = [
        "| chains, 128 columns | columns of a block | us for 16 steps | bytes at 4.3 TB/s, us | times that |",
        "|---|---|---|---|---|",
    ]
    for load in (2, 8, 16, 32, 64, 128):
        here = rows(results, ncols=128, load=load)
        means = {
            width: sum(row["us"] for row in here if row["columns"] == width) / 2
            for width in sorted({row["columns"] for row in here})
        }
        width = min(means, key=lambda width: means[width])
        us, floor = means[width], here[0]["floor_us"]
        lines.append(f"| {load} | {width} | {us:.1f} | {floor:.1f} | {us / floor:.2f} |")
    return "\n".join(lines)


def fla_tests(results: dict[str, Any]) -> str:
    """What became of flash-linear-attention's own tests, and why calls were handed back."""
    lines = ["| run | op | tests | passed | refused | failed | skipped |", "|---|---|---|---|---|---|---|"]
    for name, ops in results["runs"].items():
        for op, found in ops.items():
            counts = (found[key] for key in ("tests", "passed", "refused", "failed", "skipped"))
            lines.append(f"| {name} | {op} | {' | '.join(map(str, counts))} |")
    lines += ["", "| run | op | refused with | tests |", "|---|---|---|---|"]
    found_by_run = [(name, op, found) for name, ops in results["runs"].items() for op, found in ops.items()]
    for name, op, found in found_by_run:
        lines += [f"| {name} | {op} | {why} | {count} |" for why, count in found["reasons"].items()]
    if any(found["failures"] for *_, found in found_by_run):
        lines += ["", "| run | op | failed | why | the same without cake |", "|---|---|---|---|---|"]
    for name, op, found in found_by_run:
        for test, failure in found["failures"].items():
            words = (" ".join(text.split()) for text in (failure["why"], failure.get("without cake", "–")))
            lines.append(f"| {name} | {op} | `{test}` | {' | '.join(words)} |")
    return "\n".join(lines)


#: Columns of the host's table: what is measured, pass, title.
HOST = (
    ("host_us", "fwd", "fwd"),
    ("host_us", "fwd_train", "with the tape"),
    ("host_us", "fwd+bwd", "fwd+bwd"),
    ("host_one_thread_us", "fwd+bwd", "1 thread"),
    ("host_in_a_row_us", "fwd", "in a row: fwd"),
    ("host_in_a_row_us", "fwd_train", "with the tape"),
    ("host_in_a_row_us", "bwd", "bwd, 1 thread"),
)


def host(results: dict[str, Any]) -> str:
    """Time until an eager call returns on an idle GPU, and what a call that launches nothing needs."""
    titles = " | ".join(title for _, _, title in HOST)
    lines = [f"| until the call returns, us | {titles} |", "|---" * (1 + len(HOST)) + "|"]
    for shape in ("M", "h4v12-rl"):
        heads = rows(results, shape=shape)[0]["heads"]
        for title, arm, mode in (("cake", "cake-det", "save"), ("FlashQLA", "flashqla", None)):
            figures = [
                cell(
                    results,
                    field,
                    0,
                    shape=shape,
                    arm=arm,
                    mode=None if name == "fwd" else mode,
                    **{"pass": name},
                )
                for field, name, _ in HOST
            ]
            lines.append(f"| {title}, ({heads[0]}, {heads[1]}) | {' | '.join(figures)} |")
    header = results["header"]
    floors = {
        "host_us": header["host_floor_us"],
        "host_one_thread_us": header.get("host_floor_one_thread_us", {}),
        "host_in_a_row_us": header.get("host_floor_one_thread_us", {}),
    }
    found = [floors[field].get(name) for field, name, _ in HOST]
    least = " | ".join("–" if us is None else f"{us:.0f}" for us in found)
    lines.append(f"| an autograd node that launches nothing, in a row | {least} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
    "gdn-shapes": (GDN, partial(shapes, arm="flashqla", title="FlashQLA")),
    "gdn-stages": (GDN, stages),
    "gdn-memory": (GDN, memory),
    "gdn-repeat": (GDN, repeat),
    "gdn-segments": (GDN, segments),
    "gdn-host": (GDN, host),
    "kda-shapes": (KDA, partial(shapes, arm="fla", title="FLA")),
    "kda-few-heads": (KDA.with_name("h200-few-heads.json"), partial(shapes, arm="fla", title="FLA")),
    "kda-stages": (KDA, partial(stages, shape="h64-1x16384")),
    "gdn-ranks": (GDN.with_name("h200-ranks.json"), ranks),
    "kda-ranks": (KDA.with_name("h200-ranks.json"), ranks),
    "merge": (MERGE, merge),
    "fla-tests": (FLA_TESTS, fla_tests),
}


UNMEASURED = "No results of it are committed."
#: Picture: the results that it shows.
PICTURES: dict[Path, Path] = {ROOT / "docs" / "gdn-h200.png": GDN}


def rendered(text: str) -> str:
    """A document with its tables as the results say."""

    def table(match: re.Match[str]) -> str:
        path, make = TABLES[match[1]]
        found = make(json.loads(path.read_text())) if path.is_file() else UNMEASURED
        return f"<!-- measured {match[1]} -->\n{found}\n<!-- /measured -->"

    return MARK.sub(table, text)


def digest(path: Path) -> str:
    """What a picture of these results holds."""
    rows = json.loads(path.read_text())["rows"]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def is_drawn(picture: Path, results: Path) -> bool:
    """Whether the picture shows these results. Text in a PNG is not compressed."""
    return picture.is_file() and digest(results).encode() in picture.read_bytes()


def draw(picture: Path, results: Path) -> None:
    from cake.core.bench import chart

    document = json.loads(results.read_text())
    chart(document, picture, note=f"results {digest(results)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table differs")
    check = parser.parse_args().check
    stale = [path for path in DOCUMENTS if rendered(path.read_text()) != path.read_text()]
    undrawn = [path for path, results in PICTURES.items() if not is_drawn(path, results)]
    for path in [*stale, *undrawn]:
        print(f"{path.relative_to(ROOT)}: {'differs from its results' if check else 'rewritten'}")
    if check:
        return int(bool(stale or undrawn))
    for path in stale:
        path.write_text(rendered(path.read_text()))
    for path in undrawn:
        draw(path, PICTURES[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
