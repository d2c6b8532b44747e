from __future__ import annotations

import io
import json
import math
import subprocess

import pytest
import torch

from cake.core.bench import Bench, Plan, Results, Shape, document, git_commit, header, table, write_json
from cake.core.bench._runner import row

SHAPE = Shape("M", (16, 48), (12000, 9000))


def text(made):
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(made)
    return console.export_text()


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "deep" / "results.json"
    write_json(path, {"rows": [1]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"rows": [math.nan]})
    with pytest.raises(TypeError):
        write_json(path, {"rows": [object()]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    write_json(path, {"rows": [2]})
    assert json.loads(path.read_text()) == {"rows": [2]}
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_header_names_the_place_and_the_versions(toy):
    op_bench = Bench("toy", (SHAPE,), (), lambda *_: None, distributions=("no-such-peer",))
    head = header(op_bench, Plan((SHAPE,), ()), torch.device("cpu"), commit="abc123")
    assert head["commit"] == "abc123"
    assert head["gpu"] is None
    assert head["driver"] is None
    assert head["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert head["versions"]["cake-toy"] == "1.0"
    assert head["versions"]["no-such-peer"] is None
    assert {"cake-core", "apache-tvm-ffi", "triton"} <= set(head["versions"])
    assert head["kernels"].startswith("sha256:")
    assert head["method"]["samples"] == 15
    assert head["date"].endswith("+00:00")
    assert json.loads(json.dumps(head)) == head


def test_commit_of_a_checkout_and_of_none(tmp_path):
    assert git_commit(tmp_path / "file.py") is None

    def git(*words):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    source = tmp_path / "file.py"
    source.write_text("1\n")
    git("add", "file.py")
    git("commit", "-m", "first")
    commit = git_commit(source)
    assert len(commit) == 40
    source.write_text("2\n")
    assert git_commit(source) == commit + "+"


def test_table_has_a_line_per_arm_and_mode_with_forward_times_joined():
    rows = [
        row("gdn", SHAPE, "fwd", "cake-det", None, gpu_ms=0.5, wall_ms=0.75),
        row("gdn", SHAPE, "fwd", "flashqla", None, gpu_ms=0.6, wall_ms=1.5),
        row("gdn", SHAPE, "fwd+bwd", "cake-det", "save", gpu_ms=4.25, wall_ms=4.5, host_us=321.4,
            host_one_thread_us=123.4, host_in_a_row_us=98.7, peak_bytes=2_500_000_000,
            saved_bytes=1_000_000_000),
        row("gdn", SHAPE, "fwd+bwd", "cake-det", "recompute", gpu_ms=4.75, wall_ms=5.0),
        row("gdn", SHAPE, "fwd+bwd", "floor", "save", gpu_ms=1.25),
    ]  # fmt: skip
    lines = text(table(Results(rows=rows))).splitlines()
    (save,) = [line for line in lines if "cake-det" in line and "save" in line]
    for word in ("M", "16,48", "0.500 / 0.750", "4.250 / 4.500", "321", "123", "99", "2500.0", "1000.0"):
        assert word in save
    (recompute,) = [line for line in lines if "recompute" in line]
    assert "4.750 / 5.000" in recompute
    assert "0.500" not in recompute
    (floor,) = [line for line in lines if "floor" in line]
    assert "1.250" in floor
    assert "/" not in floor
    (peer,) = [line for line in lines if "flashqla" in line]
    assert "0.600 / 1.500" in peer


def test_table_keeps_the_order_of_shapes_and_arms():
    other = Shape("A", (1, 1), (1,))
    rows = [
        row("gdn", shape, which, arm, mode, gpu_ms=1.0)
        for shape in (SHAPE, other)
        for which, modes in (("fwd", [None]), ("bwd", ["save", "recompute"]))
        for mode in modes
        for arm in ("cake-det", "cake-fast")
    ]
    lines = [line.split() for line in text(table(Results(rows=rows))).splitlines() if "cake-" in line]
    found = [next(word for word in line if word.startswith("cake-")) for line in lines]
    assert found == ["cake-det", "cake-det", "cake-fast", "cake-fast"] * 2
    assert ["M" in line for line in lines] == [True] + [False] * 7
    assert ["A" in line for line in lines] == [False] * 4 + [True] + [False] * 3


def test_table_of_a_cpu_shows_wall_times_alone():
    shown = text(table(Results(rows=[row("gdn", SHAPE, "fwd", "cake-det", None, wall_ms=1.5)])))
    assert "1.500" in shown
    assert "/" not in shown


def test_table_of_nothing():
    assert "shape" in text(table(Results()))


def test_document_has_the_agreed_parts():
    results = Results(rows=[{"op": "gdn"}], notes=["n"])
    assert document({"gpu": "x"}, results) == {
        "header": {"gpu": "x"},
        "rows": [{"op": "gdn"}],
        "kernels": [],
        "checks": [],
        "notes": ["n"],
    }
