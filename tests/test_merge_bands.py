"""The bands by which a merge is built choose what the committed measurements found fastest."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cake.core import state_chain

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "packages" / "cake-core" / "benchmarks" / "results").glob("*-merge.json"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("merge_bench", ROOT / "tools" / "merge_bench.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(times: dict[int, dict[int, float]]) -> list[dict[str, Any]]:
    """Rows of both directions: by load, microseconds of builds."""
    return [
        {"ncols": 128, "load": load, "columns": width, "transposed": transposed, "us": us}
        for load, builds in times.items()
        for width, us in builds.items()
        for transposed in (False, True)
    ]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
class TestCommitted:
    def test_the_bands_choose_the_fastest(self, tool: ModuleType, path: Path) -> None:
        assert tool.slower(json.loads(path.read_text())["rows"]) == []

    def test_it_is_of_every_build_on_both_sides_of_every_border(self, path: Path) -> None:
        found = json.loads(path.read_text())["rows"]
        loads = {row["load"] for row in found}
        for most, _ in state_chain.BANDS["sm_90a"][:-1]:
            assert max(x for x in loads if x <= most) > 0.9 * most
            assert min(x for x in loads if x > most) < 1.5 * most
        kinds = {(row["ncols"], row["load"], row["transposed"], row["columns"]) for row in found}
        assert len(kinds) == len(found) == 2 * len(loads) * 2 * len(state_chain.COLUMNS)


def test_a_beaten_build_is_named(tool: ModuleType) -> None:
    chosen = state_chain.columns_per_block(8, 128, "sm_90a")
    other = next(width for width in state_chain.COLUMNS if width != chosen)
    assert tool.slower(rows({8: {chosen: 10.0, other: 10.1}})) == []
    assert tool.slower(rows({8: {chosen: 10.1, other: 10.0}})) == []  # within the noise
    (line,) = tool.slower(rows({8: {chosen: 12.0, other: 10.0}}))
    assert line == f"ncols 128, load 8: {chosen} columns take 12.0 us, {other} take 10.0"


def test_bands_of_measured_times(tool: ModuleType) -> None:
    times = {load: {8: 1.0 * load, 16: 4 + 0.5 * load, 32: 12 + 0.25 * load} for load in (2, 6, 10, 40)}
    assert tool.bands(rows(times)) == [(6, 8), (10, 16), (None, 32)]
    assert "[" in tool.table(rows({8: dict.fromkeys(state_chain.COLUMNS, 5.0)}))


def test_floor_counts_each_tile_once(tool: ModuleType) -> None:
    # 64 chains of 16 steps at 128 columns: B, M and the states, 64 KiB each.
    assert tool.floor_us(64, 128) == pytest.approx(64 * 16 * 3 * 65536 / 4.3e6)
