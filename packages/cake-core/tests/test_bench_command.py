"""``cake bench`` on a throw-away op, on a CPU."""

from __future__ import annotations

import json
import os

import pytest

from cake.core.bench import Shape, chart, comparison, run_in_turn
from cake.core.bench._turns import groups
from cake.core.cli import main
from cake.core.testing import installed_distribution

SPEC = """
from cake.core.spec import OpSpec, Selection

SPEC = OpSpec("timed", "cake-timed", selection=Selection("timed_backend"), bench="cake.timed.bench:BENCH")
SPREAD = OpSpec("spread", "cake-timed", bench="cake.timed.bench:SPREAD")
SILENT = OpSpec("silent", "cake-timed")
"""

BENCH = """
import os
from functools import partial

import torch
import torch.distributed as dist

from cake.core.bench import Arm, Bench, Inputs, Shape


def inputs(shape, device, seed):
    if "TIMED_LOG" in os.environ:
        with open(os.environ["TIMED_LOG"], "a") as log:
            log.write(f"{os.getpid()} {shape.name}\\n")
    x = torch.randn(shape.tokens, device=device).requires_grad_()
    return Inputs(shape, {"x": x}, (torch.ones(shape.tokens, device=device),))


def call(factor, given):
    return (given.tensors["x"].exp() * factor,)


def configuration(variant, mode):
    return {"timed_backend": "cake", "cake_timed_variant": variant}


def absent():
    import no_such_peer


def under(context, layout):
    if "TIMED_FATE" in os.environ and context.rank == 1:
        if os.environ["TIMED_FATE"] == "dies":
            os._exit(7)
        raise ValueError("on purpose")

    def call(given):
        assert given.tensors["x"].shape == (1, context.tokens, 1)
        return (given.tensors["x"].exp(),)

    return call


def packed(shape, device, seed):
    x = torch.randn(1, shape.tokens, 1, device=device).requires_grad_()
    return Inputs(shape, {"x": x}, (torch.ones_like(x),))


def own(variant, factor):
    return Arm(f"cake-{variant}", lambda: partial(call, factor), ("save", "recompute"),
               partial(configuration, variant))


SPREAD = Bench(
    "timed",
    (Shape("tiny", (1, 1), (5, 3), tiny=True), Shape("odd", (1, 1), (7,), spread=True)),
    (
        Arm("cake-det", lambda: partial(call, 1.0), under=under),
        Arm("wrong", lambda: partial(call, 2.0), peer=True, under=under),
        Arm("alone", lambda: partial(call, 1.0), peer=True),
    ),
    packed,
)


BENCH = Bench(
    "timed",
    (Shape("tiny", (1, 2), (5, 3), tiny=True), Shape("wide", (4, 4), (64,))),
    (
        own("det", 1.0),
        own("fast", 1.0),
        Arm("peer", lambda: partial(call, 1.0), peer=True),
        Arm("wrong", lambda: partial(call, 2.0), peer=True),
        Arm("absent", absent, peer=True),
    ),
    inputs,
    distributions=("cake-timed",),
)
"""


@pytest.fixture
def timed(tmp_path):
    files = {"cake/timed/__init__.py": "", "cake/timed/spec.py": SPEC, "cake/timed/bench.py": BENCH}
    ops = {"timed": "cake.timed.spec:SPEC", "silent": "cake.timed.spec:SILENT"}
    ops["spread"] = "cake.timed.spec:SPREAD"
    with installed_distribution(tmp_path / "site", "cake-timed", ops=ops, files=files):
        yield tmp_path


def bench(*words):
    return main(["bench", "timed", "--device", "cpu", "--samples", "2", "--warmups", "1", *words])


def test_writes_rows_and_prints_a_table(timed, capsys):
    out = timed / "results.json"
    assert bench("--vs", "peer,absent", "--out", str(out), "--commit", "abc") == 0
    found = json.loads(out.read_text())
    assert set(found) == {"header", "rows", "kernels", "checks", "notes"}
    assert found["header"]["commit"] == "abc"
    assert {row["arm"] for row in found["rows"]} == {"cake-det", "cake-fast", "peer"}
    assert {row["shape"] for row in found["rows"]} == {"tiny"}
    # Each own arm: fwd, and three passes in two modes; the peer: four passes.
    assert len(found["rows"]) == 2 * (1 + 3 * 2) + 4
    for row in found["rows"]:
        assert row["wall_ms"] > 0.0
        assert row["gpu_ms"] is None
    assert all(check["passed"] for check in found["checks"])
    assert found["notes"] == ["absent: can't be loaded: ModuleNotFoundError: No module named 'no_such_peer'"]
    printed = capsys.readouterr()
    for word in ("cake-det", "recompute", "peer", "fwd+bwd", "No module named 'no_such_peer'"):
        assert word in printed.out
    assert "tiny: fwd+bwd" in printed.err


def test_options_choose_shapes_passes_variants_and_modes(timed):
    out = timed / "results.json"
    words = (
        "--shapes",
        "wide,tiny",
        "--passes",
        "bwd,fwd",
        "--variants",
        "cake-fast",
        "--modes",
        "recompute",
    )
    assert bench(*words, "--out", str(out)) == 0
    found = [(r["shape"], r["arm"], r["pass"], r["mode"]) for r in json.loads(out.read_text())["rows"]]
    assert found == [
        ("wide", "cake-fast", "fwd", None),
        ("wide", "cake-fast", "bwd", "recompute"),
        ("tiny", "cake-fast", "fwd", None),
        ("tiny", "cake-fast", "bwd", "recompute"),
    ]


def test_shapes_run_one_by_one_are_kept_in_one_file(timed):
    out = timed / "results.json"
    common = ("--passes", "fwd", "--variants", "cake-det", "--keep", "--out", str(out))
    for shape, commit in (("tiny", "first"), ("wide", "second"), ("tiny", "third")):
        assert bench("--shapes", shape, "--commit", commit, *common) == 0
    found = json.loads(out.read_text())
    assert [row["shape"] for row in found["rows"]] == ["wide", "tiny"]
    assert found["header"]["commit"] == "third"
    assert [head["commit"] for head in found["header"]["earlier"]] == ["first", "second"]
    assert not any("earlier" in head for head in found["header"]["earlier"])


def test_processes_compile_side_by_side_and_are_timed_in_turn(timed, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(timed / "site"))
    monkeypatch.setenv("TIMED_LOG", str(timed / "log"))
    words = ("--shapes", "tiny,wide", "--vs", "peer", "--passes", "fwd", "--compile-jobs", "2")
    assert bench(*words, "--out", str(timed / "results.json")) == 0
    calls = [tuple(line.split()) for line in (timed / "log").read_text().splitlines()]
    by_shape = {shape: {process for process, name in calls if name == shape} for shape in ("tiny", "wide")}
    assert all(len(processes) == 1 and str(os.getpid()) not in processes for processes in by_shape.values())
    assert by_shape["tiny"] != by_shape["wide"]
    # Each makes its inputs twice: to compile, and in its turn.
    assert {shape for _, shape in calls[:2]} == {"tiny", "wide"}
    assert [shape for _, shape in calls[2:]] == ["tiny", "wide"]
    found = json.loads((timed / "results.json").read_text())
    assert found["notes"] == []
    assert {(row["shape"], row["arm"]) for row in found["rows"]} >= {("tiny", "peer"), ("wide", "cake-det")}
    assert "wide: timed" in capsys.readouterr().err


def test_a_process_that_fails_or_is_late_is_noted_and_fails_the_run(timed):
    shape = Shape("tiny", (1, 1), (8,))
    late = run_in_turn(["bench", "timed"], [shape], processes=1, seconds=0.0)
    assert late.failed
    assert late.notes == ["tiny: was not ready in time"]
    broken = run_in_turn(["bench", "no-such-op"], [shape], processes=1)
    assert broken.failed
    assert "no-such-op" in broken.notes[0]


@pytest.mark.parametrize(("processes", "expected"), [(8, ["ac", "b", "d"]), (2, ["acd", "b"]), (1, ["acbd"])])
def test_shapes_of_one_head_count_share_a_process(processes, expected):
    shapes = [
        Shape(name, heads, (8,)) for name, heads in zip("abcd", ((1, 1), (1, 2), (1, 1), (2, 2)), strict=True)
    ]
    assert ["".join(s.name for s in group) for group in groups(shapes, processes)] == expected


def test_arms_that_disagree_make_the_command_fail(timed, capsys):
    assert bench("--vs", "wrong", "--passes", "fwd") == 1
    assert "wrong differs from cake-det" in capsys.readouterr().out.replace("\n", " ")


def test_all_others_are_timed_and_absent_ones_named(timed):
    out = timed / "results.json"
    assert bench("--vs", "all", "--passes", "fwd", "--variants", "cake-det", "--out", str(out)) == 1
    found = json.loads(out.read_text())
    assert {row["arm"] for row in found["rows"]} == {"cake-det", "peer"}
    assert any(note.startswith("absent: can't be loaded") for note in found["notes"])
    assert any("wrong differs from" in note for note in found["notes"])


def test_time_budget_of_nothing_runs_nothing(timed):
    out = timed / "results.json"
    assert bench("--time-budget", "0", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    assert found["rows"] == []
    assert found["notes"] == ["tiny: not run, the time budget is spent"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shapes", "huge"), "shapes of 'timed' are tiny, wide, got 'huge'"),
        (("--vs", "nobody"), "--vs must be of peer, wrong, absent, got 'nobody'"),
        (("--vs", "cake-det"), "--vs must be of peer, wrong, absent, got 'cake-det'"),
        (("--passes", "sideways"), "--passes must be of fwd, fwd_train, bwd, fwd+bwd, got 'sideways'"),
        (("--variants", "slow"), "--variants must be of cake-det, cake-fast, got 'slow'"),
        (("--modes", "none"), "--modes must be of save, recompute, got 'none'"),
        (("--device", "mps"), "--device must be a CPU or a CUDA GPU, got 'mps'"),
        (("--device", "gpu"), "--device must be a CPU or a CUDA GPU, got 'gpu'"),
        (("--out", "."), "--out must be a file, got the folder ."),
        (("--png", "."), "--png must be a file, got the folder ."),
        (("--out", f"{__file__}/out.json"), "--out must be a file in a folder that can be written to, got"),
        (("--keep",), "--keep needs --out"),
        (("--keep", "--out", __file__), "holds no results of cake bench: JSONDecodeError"),
    ],
)
def test_wrong_words_are_told_before_anything_is_measured(timed, capsys, monkeypatch, words, message):
    monkeypatch.setattr("cake.core.cli.bench._measure", None)
    pytest.importorskip("matplotlib" if "--png" in words else "torch")
    assert bench(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value", "least"), [("--samples", "0", 1), ("--warmups", "-1", 0)])
def test_counts_have_a_least_value(timed, capsys, option, value, least):
    with pytest.raises(SystemExit) as stopped:
        bench(option, value)
    assert stopped.value.code == 2
    assert f"expected {least} or more, got {value}" in capsys.readouterr().err


def test_an_op_without_a_bench_and_an_unknown_op(timed, capsys):
    assert main(["bench", "silent"]) == 1
    assert "'silent' declares no bench" in capsys.readouterr().err
    assert main(["bench", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_list(timed, capsys):
    assert main(["bench", "timed", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tiny (1, 2) 5+3",
        "wide (4, 4) 64",
        "arms: cake-det, cake-fast, peer, wrong, absent",
    ]


def test_results_of_an_earlier_run_are_shown_and_compared(timed, capsys):
    out = timed / "results.json"
    assert bench("--passes", "fwd", "--variants", "cake-det", "--out", str(out)) == 0
    old = json.loads(out.read_text())
    for row in old["rows"]:
        row["wall_ms"] *= 0.5
    earlier = timed / "earlier.json"
    earlier.write_text(json.dumps(old))
    capsys.readouterr()
    assert bench("--from", str(out), "--compare", str(earlier)) == 0
    printed = capsys.readouterr()
    assert "against" in printed.out
    assert "2.000" in printed.out
    assert "slower" in printed.out
    assert printed.err == ""  # nothing was measured
    assert bench("--passes", "fwd", "--variants", "cake-det", "--compare", str(out)) == 0
    assert "new / old" in capsys.readouterr().out


def test_comparison_takes_rows_that_both_have():
    def row(shape, arm, gpu, wall):
        place = {"op": "timed", "shape": shape, "pass": "fwd", "arm": arm, "mode": None}
        return {**place, "gpu_ms": gpu, "wall_ms": wall}

    old = {
        "rows": [
            row("a", "cake-det", 2.0, 4.0),
            row("b", "cake-det", None, 4.0),
            row("a", "floor", 1.0, None),
        ]
    }
    new = {
        "rows": [
            row("a", "cake-det", 1.0, 9.0),
            row("b", "cake-det", 1.0, 3.0),
            row("c", "cake-det", 1.0, 1.0),
        ]
    }
    found = [(r["shape"], r["time"], r["old"], r["new"], r["ratio"]) for r in comparison(old, new)]
    assert found == [("a", "gpu_ms", 2.0, 1.0, 0.5), ("b", "wall_ms", 4.0, 3.0, 0.75)]


def test_a_picture_is_drawn(timed, capsys):
    pytest.importorskip("matplotlib")
    out, png = timed / "results.json", timed / "deep" / "bars.png"
    assert bench("--vs", "peer", "--out", str(out), "--png", str(png)) == 0
    first = png.read_bytes()
    assert first.startswith(b"\x89PNG")
    assert bench("--from", str(out), "--png", str(png)) == 0
    assert png.read_bytes() == first  # nothing but the results decides what is drawn


def test_a_picture_shows_every_arm_and_the_floor(timed):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    original = figure.Figure.savefig

    def savefig(self, *words, **options):
        drawn.append(self)
        return original(self, *words, **options)

    def row(shape, which, arm, gpu):
        return {
            "op": "timed",
            "shape": shape,
            "pass": which,
            "arm": arm,
            "mode": None,
            "gpu_ms": gpu,
            "wall_ms": 1.0,
        }

    rows = [
        row(shape, which, arm, gpu)
        for shape in ("a", "b")
        for which in ("fwd", "fwd+bwd", "bwd")
        for arm, gpu in (("cake-det", 2.0), ("peer", 3.0), ("floor", 1.0))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Figure, "savefig", savefig)
        chart({"header": {"gpu": "G", "cpu": "c"}, "rows": rows}, timed / "bars.png")
    panels = drawn[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == ["fwd", "fwd+bwd"]
    for panel in panels:
        heights = [[bar.get_height() for bar in bars] for bars in panel.containers]
        assert heights == [[2.0, 2.0], [3.0, 3.0]]
        assert len(panel.collections) == 2  # the floor of each shape
        assert [label.get_text() for label in panel.get_xticklabels()] == ["a", "b"]


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(timed, capsys, monkeypatch):
    monkeypatch.setattr("cake.core.cli.bench.find_spec", lambda name: None)
    assert bench("--png", str(timed / "bars.png")) == 2
    printed = capsys.readouterr()
    assert "a chart needs matplotlib: pip install 'cake-core[chart]'" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("option", ["--from", "--compare"])
def test_a_file_without_results_is_wrong_usage(timed, capsys, option):
    other = timed / "other.json"
    for text, message in (
        ("{", "holds no results of cake bench: JSONDecodeError"),
        ("{}", "holds no results of cake bench: KeyError"),
        ('{"rows": [{"op": "gdn"}]}', "must hold results of 'timed', got gdn"),
    ):
        other.write_text(text)
        assert bench(option, str(other)) == 2
        assert message in capsys.readouterr().err


class TestRanks:
    """Runs over several processes: what the op's calls find, what a rank that fails does to the others."""

    @pytest.fixture
    def run(self, timed, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(timed / "site"))
        out = timed / "results.json"
        words = ["--device", "cpu", "--samples", "1", "--warmups", "0", "--passes", "fwd+bwd"]

        def run(*more):
            status = main(["bench", "spread", *words, "--world-size", "2", "--out", str(out), *more])
            return status, json.loads(out.read_text())

        return run

    def test_rows_of_one_rank_and_of_all(self, run):
        status, found = run("--vs", "alone", "--shapes", "tiny,odd")
        assert status == 1  # for 7 tokens don't divide by 2
        rows = [(row["shape"], row["arm"], row["world_size"], row["layout"]) for row in found["rows"]]
        assert rows == [
            ("tiny", "cake-det", 1, None),
            ("tiny", "alone", 1, None),
            ("tiny", "cake-det x2 contiguous", 2, "contiguous"),
            ("tiny", "cake-det x2 zigzag", 2, "zigzag"),
            ("odd", "cake-det", 1, None),
            ("odd", "alone", 1, None),
        ]
        assert found["notes"][:2] == ["tiny: alone has no calls under a context"] * 2
        assert [note.split(":")[0] for note in found["notes"][2:]] == ["odd, contiguous", "odd, zigzag"]
        assert [check["errors"] for check in found["checks"]] == [{"output0": 0.0, "dx": 0.0}] * 2

    def test_an_arm_that_fails_on_one_rank_is_left_out_on_all(self, run, monkeypatch):
        monkeypatch.setenv("TIMED_FATE", "raises")
        status, found = run("--layouts", "zigzag")
        assert status == 1
        assert [row["arm"] for row in found["rows"]] == ["cake-det"]
        assert found["notes"] == ["tiny: cake-det x2 zigzag: another rank failed"]

    def test_a_rank_that_dies_ends_the_run(self, run, monkeypatch):
        monkeypatch.setenv("TIMED_FATE", "dies")
        status, found = run("--layouts", "zigzag")
        assert status == 1
        assert any(note.startswith("rank 1: ended with status 7") for note in found["notes"])

    def test_what_cannot_be_spread_is_wrong_usage(self, timed, capsys, monkeypatch):
        import torch

        for words, message in (
            (("--device", "cpu", "--layouts", "round"), "--layouts must be of contiguous, zigzag, "),
            (("--device", "cpu", "--compile-jobs", "2"), "can't be used with --compile-jobs"),
        ):
            assert main(["bench", "spread", "--world-size", "2", *words]) == 2
            assert message in capsys.readouterr().err
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert main(["bench", "spread", "--world-size", "2"]) == 2
        assert "--world-size 2 needs 2 CUDA GPUs, one for each rank, found 1" in capsys.readouterr().err
