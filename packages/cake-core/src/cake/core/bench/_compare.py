"""Two results documents beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["comparison", "differences"]

#: Differences of less than this share are noise: they get no mark.
NOISE = 0.03


def comparison(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every row that both documents have, with both times and ``new / old``.

    GPU time where both have it, else wall time; rows of the floor are left out.
    """
    before = {_place(row): row for row in old["rows"]}
    found = []
    for row in new["rows"]:
        was = before.get(_place(row))
        if was is None or row["arm"] == "floor":
            continue
        field = "gpu_ms" if row["gpu_ms"] is not None and was["gpu_ms"] is not None else "wall_ms"
        if row[field] is None or was[field] is None:
            continue
        found.append(
            {
                **{key: row[key] for key in ("shape", "pass", "arm", "mode")},
                "time": field,
                "old": was[field],
                "new": row[field],
                "ratio": row[field] / was[field],
            }
        )
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    """`comparison` as a table: new times, old times, and their quotient, below 1 where it is faster now."""
    from rich.table import Table

    made = Table(title=f"against {_name(old)}", title_justify="left")
    for name in ("shape", "pass", "arm", "mode"):
        made.add_column(name)
    for name in ("old ms", "new ms", "new / old"):
        made.add_column(name, justify="right")
    made.add_column("")
    for row in comparison(old, new):
        mark = ""
        if row["ratio"] > 1 + NOISE:
            mark = "[red]slower[/red]"
        elif row["ratio"] < 1 - NOISE:
            mark = "[green]faster[/green]"
        made.add_row(
            row["shape"],
            row["pass"],
            row["arm"],
            row["mode"] or "",
            f"{row['old']:.3f}",
            f"{row['new']:.3f}",
            f"{row['ratio']:.3f}",
            mark,
        )
    return made


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("op", "shape", "pass", "arm", "mode"))


def _name(document: Mapping[str, Any]) -> str:
    head = document["header"]
    return ", ".join(str(head[key]) for key in ("gpu", "commit", "date") if head.get(key) is not None)
