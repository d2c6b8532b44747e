"""The picture of a benchmark: bars of every arm beside each other, and the floor that none can undercut.

Needs matplotlib, the extra ``chart`` of cake-core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CHART_PASSES", "chart"]

CHART_PASSES = ("fwd", "fwd+bwd")
MISSING = "a chart needs matplotlib: pip install 'cake-core[chart]', or leave --png out"
# cake's arms dark, others light, in the order in which they come.
OWN = ("#1b4965", "#5fa8d3")
OTHERS = ("#f4a261", "#e76f51", "#8d99ae", "#bc6c25")


def chart(
    document: Mapping[str, Any], path: Path, passes: Sequence[str] = CHART_PASSES, *, note: str | None = None
) -> None:
    """Draws a results document.

    Args:
        document: what `cake bench --out` writes. Bars are GPU time where it was measured, else wall time; of
            an arm with several modes the first is drawn.
        path: the PNG.
        passes: which passes; one panel each.
        note: written into the PNG as its description.

    Raises:
        ImportError: matplotlib isn't installed; the message says how to get it.
        ValueError: the document holds no row of these passes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(MISSING) from None

    rows = [row for row in document["rows"] if row["pass"] in passes]
    shown = [which for which in passes if any(row["pass"] == which for row in rows)]
    if not shown:
        raise ValueError(f"the results have no pass of {', '.join(passes)}")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != "floor"]
    figure = Figure(figsize=(max(6.0, 0.75 * len(shapes) + 2), 3.2 * len(shown)), layout="constrained")
    for index, which in enumerate(shown):
        axes = figure.add_subplot(len(shown), 1, index + 1)
        here = [row for row in rows if row["pass"] == which]
        field = (
            "gpu_ms" if any(row["gpu_ms"] is not None for row in here if row["arm"] != "floor") else "wall_ms"
        )
        width = 0.8 / max(len(arms), 1)
        for place, arm in enumerate(arms):
            values = [_value(here, shape, arm, field) for shape in shapes]
            at = [x + (place - (len(arms) - 1) / 2) * width for x in range(len(shapes))]
            axes.bar(at, [value or 0.0 for value in values], width, label=arm, color=_color(arm, arms))
        for x, shape in enumerate(shapes):
            floor = _value(here, shape, "floor", "gpu_ms")
            if floor is not None:
                label = "floor" if x == 0 else "_floor"  # an underscore keeps it out of the legend
                axes.hlines(
                    floor, x - 0.45, x + 0.45, colors="black", linestyles="dashed", lw=1.2, label=label
                )
        axes.set_xticks(
            range(len(shapes)), shapes, rotation=30, ha="right", rotation_mode="anchor", fontsize=8
        )
        axes.set_ylabel(f"{'GPU' if field == 'gpu_ms' else 'wall'} time, ms")
        axes.set_title(which, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if index == 0:
            axes.legend(frameon=False, fontsize=8, ncols=max(1, len(arms) + 1))
    head = document["header"]
    figure.suptitle(f"{rows[0]['op']} on {head['gpu'] or head['cpu']}", fontsize=11)
    figure.savefig(path, dpi=150, format="png", metadata={"Software": None, "Description": note})


def _value(rows: Sequence[Mapping[str, Any]], shape: str, arm: str, field: str) -> float | None:
    for row in rows:
        if row["shape"] == shape and row["arm"] == arm:
            value: float | None = row[field]
            return value
    return None


def _color(arm: str, arms: Sequence[str]) -> str:
    own = [name for name in arms if name.startswith("cake")]
    if arm in own:
        return OWN[own.index(arm) % len(OWN)]
    others = [name for name in arms if name not in own]
    return OTHERS[others.index(arm) % len(OTHERS)]
