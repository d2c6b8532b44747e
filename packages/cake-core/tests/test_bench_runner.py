"""The run of ``cake bench`` on a small op, with a meter that counts and a clock that the test moves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cake.core import config
from cake.core.bench import Arm, Bench, Ceilings, Inputs, Plan, Runner, Shape, Work
from cake.core.bench._measure import Contender, measure

CPU = torch.device("cpu")
SMALL = Shape("small", (1, 2), (3, 0, 5))
LARGE = Shape("large", (2, 4), (40,))
KEYS = [
    "op", "shape", "heads", "lengths", "pass", "arm", "mode",
    "gpu_ms", "wall_ms", "host_us", "host_one_thread_us", "host_in_a_row_us", "peak_bytes", "saved_bytes",
]  # fmt: skip


class CountingMeter:
    """Runs what it is given; every sample takes one ms more than the last, each profile finds two kernels."""

    def __init__(self):
        self.samples = 0
        self.log = []

    def sample(self, prepare, run):
        self.samples += 1
        self.log.append("sample")
        run(prepare())
        return float(self.samples), 10.0 * self.samples

    def kernels(self, prepare, run):
        self.log.append("kernels")
        run(prepare())
        return [("scan", 2.0), ("prep", 0.5), ("scan", 1.0)]

    def peak_bytes(self, prepare, run):
        self.log.append("peak")
        run(prepare())
        return 1000

    def synchronize(self):
        self.log.append("synchronize")


def inputs(shape, device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape.tokens, generator=generator).requires_grad_()
    w = torch.randn(shape.tokens, generator=generator).requires_grad_()
    index = torch.arange(shape.tokens)
    return Inputs(shape, {"x": x, "w": w, "index": index}, (torch.ones(shape.tokens), None))


def product(given):
    x, w = given.tensors["x"], given.tensors["w"]
    return (x.exp() * w, None)


def truth(given):
    x, w = (given.tensors[name].detach().double() for name in "xw")
    return {"output0": x.exp() * w, "dx": x.exp() * w, "dw": x.exp()}


def work(shape, which, mode):
    return Work(flops=1e12 if which == "bwd" else 0.0, nbytes=1e9 if mode == "recompute" else 2e9)


def arm(name="own", call=product, **more):
    return Arm(name, lambda: call, **more)


def bench(*arms, **more):
    return Bench("timed", (SMALL, LARGE), arms, inputs, **more)


def runner(op_bench, shapes=(SMALL,), meter=None, ceilings=None, **more):
    plan = Plan(
        shapes=tuple(shapes), arms=op_bench.arms, **{"samples": 3, "warmups": 2, "profiles": 2, **more}
    )
    return Runner(op_bench, plan, CPU, meter or CountingMeter(), ceilings=ceilings)


def rows_of(results, **wanted):
    return [row for row in results.rows if all(row[key] == value for key, value in wanted.items())]


def test_rows_hold_every_key_in_order_for_every_pass_and_mode():
    results = runner(bench(arm(modes=("save", "recompute")), arm("other", peer=True))).run()
    assert [list(row) for row in results.rows] == [KEYS] * len(results.rows)
    found = Counter((row["arm"], row["pass"], row["mode"]) for row in results.rows)
    own = [("own", p, m) for p in ("fwd_train", "bwd", "fwd+bwd") for m in ("save", "recompute")]
    other = [("other", p, None) for p in ("fwd", "fwd_train", "bwd", "fwd+bwd")]
    assert found == Counter([("own", "fwd", None), *own, *other])
    for row in results.rows:
        assert (row["op"], row["shape"], row["heads"], row["lengths"]) == (
            "timed",
            "small",
            [1, 2],
            [3, 0, 5],
        )
        assert row["gpu_ms"] == 3.5
        assert row["peak_bytes"] == 1000
        assert row["host_us"] == 10 * row["wall_ms"]
        assert (row["host_one_thread_us"] is not None) == (row["pass"] in ("bwd", "fwd+bwd"))
    assert not results.failed


def test_arms_take_turns_in_another_order_each_round_and_warmups_dont_count():
    contenders = [Contender(arm(name), None, product) for name in ("own", "other")]
    own, other = measure(
        "fwd", inputs(SMALL, CPU, 0), contenders, CountingMeter(), warmups=2, samples=20, profiles=0
    )
    # Samples are numbered, two to a round; the first two rounds are warm-ups.
    rounds = list(zip(own.walls, other.walls, strict=True))
    assert [sorted(walls) for walls in rounds] == [[5 + 2 * i, 6 + 2 * i] for i in range(20)]
    assert {mine < theirs for mine, theirs in rounds} == {True, False}


def test_profiles_run_after_all_samples_and_are_grouped_by_kernel():
    meter = CountingMeter()
    results = runner(bench(arm(), arm("other", peer=True)), passes=("bwd",), meter=meter).run()
    measured = [word for word in meter.log if word != "synchronize"]
    # Six of them in one thread, and eight in a row.
    assert measured == ["sample"] * 24 + ["peak", "kernels", "kernels"] * 2
    mine = [entry for entry in results.kernels if entry["arm"] == "own"]
    assert [(k["name"], k["calls"], k["gpu_ms"]) for k in mine] == [("scan", 2, 3.0), ("prep", 1, 0.5)]
    assert set(mine[0]) == {"op", "shape", "pass", "arm", "mode", "name", "calls", "gpu_ms"}


def test_without_profiles_gpu_ms_is_none():
    results = runner(bench(arm()), profiles=0, passes=("fwd",)).run()
    assert results.rows[0]["gpu_ms"] is None
    assert results.kernels == []


def test_passes_run_what_they_say():
    seen = []

    def call(given):
        out = product(given)
        seen.append(out[0].requires_grad)
        return out

    which = {}
    for name in ("fwd", "fwd_train", "bwd", "fwd+bwd"):
        del seen[:]
        runner(bench(arm(call=call)), passes=(name,), samples=1, warmups=0, profiles=0).run()
        which[name] = seen[1:]
    # After the check: one sample, with a backward another one in one thread, two in a row, and one peak, each
    # a forward.
    assert which == {"fwd": [False] * 4, "fwd_train": [True] * 4, "bwd": [True] * 5, "fwd+bwd": [True] * 5}


def test_saved_bytes_count_each_piece_of_memory_once_and_no_input():
    def call(given):
        x, w = given.tensors["x"], given.tensors["w"]
        y = x.exp()  # keeps its result
        return (y * w * y, None)  # keeps y twice more, w (an input), and y * w

    results = runner(bench(arm(call=call)), [LARGE], passes=("fwd", "bwd")).run()
    assert rows_of(results, **{"pass": "bwd"})[0]["saved_bytes"] == 2 * 40 * 4
    assert rows_of(results, **{"pass": "fwd"})[0]["saved_bytes"] is None


def test_arm_that_cant_be_loaded_is_a_note_and_no_failure_if_a_peer():
    def missing():
        raise ImportError("No module named 'fla'")

    results = runner(bench(arm(), Arm("fla", missing, peer=True))).run()
    assert {row["arm"] for row in results.rows} == {"own"}
    assert "fla: can't be loaded: ImportError: No module named 'fla'" in results.notes
    assert not results.failed
    broken = runner(bench(Arm("own", missing), arm("other", peer=True))).run()
    assert {row["arm"] for row in broken.rows} == {"other"}
    assert broken.failed


def test_arm_that_raises_in_the_check_or_later_is_left_out():
    def refuses(given):
        raise NotImplementedError("no kernels here\nsecond line")

    calls = 0

    def breaks_later(given):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("out of luck")
        return product(given)

    results = runner(bench(arm(), arm("no", refuses, peer=True), arm("later", breaks_later, peer=True))).run()
    assert {row["arm"] for row in results.rows} == {"own"}
    assert len(rows_of(results, arm="own")) == 4
    assert "small: no: NotImplementedError: no kernels here" in results.notes
    assert "small, fwd: later: RuntimeError: out of luck" in results.notes
    assert not results.failed


def test_trouble_of_the_profiler_leaves_the_times():
    def trouble(prepare, run):
        raise RuntimeError("no counters")

    meter = CountingMeter()
    meter.kernels = trouble
    results = runner(bench(arm()), passes=("fwd",), meter=meter).run()
    (row,) = results.rows
    assert row["wall_ms"] == 4.0
    assert row["gpu_ms"] is None
    assert row["peak_bytes"] == 1000
    assert "small, fwd: own could not be profiled: RuntimeError: no counters" in results.notes
    assert not results.failed


def test_results_that_differ_are_not_timed():
    def wrong(given):
        return (product(given)[0] * 1.1, None)

    results = runner(bench(arm(), arm("wrong", wrong, peer=True))).run()
    assert {row["arm"] for row in results.rows} == {"own"}
    (check,) = results.checks
    assert (check["arm"], check["against"], check["passed"]) == ("wrong", "own", False)
    assert check["errors"] == {name: pytest.approx(0.1, rel=1e-4) for name in ("output0", "dx", "dw")}
    assert results.failed
    assert any("wrong differs from own and is not timed" in note for note in results.notes)


def test_nan_and_missing_gradients_differ():
    def nan(given):
        return (product(given)[0] * torch.nan, None)

    def detached(given):
        return (given.tensors["x"].exp() * given.tensors["w"].detach(), None)

    results = runner(bench(arm(), arm("nan", nan), arm("detached", detached))).run()
    assert {row["arm"] for row in results.rows} == {"own"}
    assert [check["passed"] for check in results.checks] == [False, False]
    assert any("only one of them has dw" in note for note in results.notes)


def test_reference_judges_all_arms_where_the_shape_is_small_enough():
    def wrong(given):
        return (product(given)[0] * 1.1, None)

    checked = bench(arm("first", wrong), arm("second"), reference=truth, reference_tokens=8)
    results = runner(checked, [SMALL]).run()
    assert {row["arm"] for row in results.rows} == {"second"}
    assert [check["against"] for check in results.checks] == ["reference"] * 2
    # Too large for the reference: the first arm is believed.
    results = runner(checked, [LARGE]).run()
    assert {row["arm"] for row in results.rows} == {"first"}


def test_arm_that_ran_alone_is_noted():
    assert "small: own ran alone and was not checked" in runner(bench(arm())).run().notes
    checked = bench(arm(), reference=truth, reference_tokens=8)
    assert runner(checked).run().notes == []


def test_arms_run_in_their_configuration_and_leave_none(toy):
    seen = set()

    def call(given):
        seen.add((config.variant("toy"), config.option("toy", "recompute_state")))
        return product(given)

    def configuration(mode):
        return toy.args(variant="fast", recompute_state=mode == "recompute")

    results = runner(bench(arm(call=call, modes=("save", "recompute"), configuration=configuration))).run()
    assert results.notes == []
    assert seen == {("fast", False), ("fast", True)}
    assert not config.configured()


def test_time_budget_stops_before_the_next_thing():
    now = [0.0]
    meter = CountingMeter()
    peak_bytes = meter.peak_bytes

    def slow(prepare, run):
        now[0] += 4.0
        return peak_bytes(prepare, run)

    meter.peak_bytes = slow
    op_bench = bench(arm())
    plan = Plan((SMALL, LARGE), op_bench.arms, samples=1, warmups=0, profiles=0, time_budget=7.0)
    shapes = []
    results = Runner(
        op_bench,
        plan,
        CPU,
        meter,
        on_shape=lambda results: shapes.append(len(results.rows)),
        clock=lambda: now[0],
    ).run()
    assert [row["pass"] for row in results.rows] == ["fwd", "fwd_train"]
    assert [note for note in results.notes if "time budget" in note] == [
        "small, bwd: not run, the time budget is spent",
        "small, fwd+bwd: not run, the time budget is spent",
        "large: not run, the time budget is spent",
    ]
    assert shapes == [2]
    assert not results.failed


def test_steps_are_as_many_as_announced():
    op_bench = bench(arm(modes=("save", "recompute")), arm("other", peer=True))
    plan = Plan((SMALL, LARGE), op_bench.arms, samples=1, warmups=0, profiles=0)
    lines = []
    Runner(op_bench, plan, CPU, CountingMeter(), on_step=lines.append).run()
    assert len(lines) == plan.steps == 2 * (3 + 4)


def test_a_broken_shape_doesnt_stop_the_others():
    def broken(shape, device, seed):
        if shape is SMALL:
            raise RuntimeError("no inputs")
        return inputs(shape, device, seed)

    op_bench = Bench("timed", (SMALL, LARGE), (arm(),), broken)
    results = runner(op_bench, [SMALL, LARGE]).run()
    assert {row["shape"] for row in results.rows} == {"large"}
    assert "small: RuntimeError: no inputs" in results.notes
    assert results.failed


def test_floor_rows_take_the_larger_term_and_add_up():
    ceilings = Ceilings(nbytes_per_s=1e12, flops_per_s=1e14)
    op_bench = bench(arm(modes=("save", "recompute")), arm("other", peer=True), work=work)
    results = runner(op_bench, ceilings=ceilings).run()
    floors = {(row["pass"], row["mode"]): row["gpu_ms"] for row in rows_of(results, arm="floor")}
    assert floors == {
        ("fwd", None): pytest.approx(2.0),
        ("fwd_train", "save"): pytest.approx(2.0),
        ("fwd_train", "recompute"): pytest.approx(1.0),
        ("bwd", "save"): pytest.approx(10.0),
        ("bwd", "recompute"): pytest.approx(10.0),
        ("fwd+bwd", "save"): pytest.approx(12.0),
        ("fwd+bwd", "recompute"): pytest.approx(11.0),
    }
    floor = rows_of(results, arm="floor")[0]
    assert list(floor) == KEYS
    assert floor["wall_ms"] is None
    assert rows_of(runner(op_bench).run(), arm="floor") == []


def test_names_of_shapes():
    op_bench = Bench("timed", (SMALL, Shape("tiny", (1, 1), (4,), tiny=True)), (), inputs)
    assert op_bench.shape("small") is SMALL
    with pytest.raises(ValueError, match="are small, tiny, got 'huge'"):
        op_bench.shape("huge")
    assert [shape.name for shape in op_bench.default_shapes("cpu")] == ["tiny"]
    assert [shape.name for shape in op_bench.default_shapes("cuda")] == ["small"]
    assert SMALL.boundaries == (0, 3, 3, 8)
    assert str(SMALL) == "small (1, 2) 3+0+5"


def test_an_arm_without_a_backward_is_checked_and_timed_forward():
    def forward(given):
        assert not torch.is_grad_enabled()
        return product(given)

    results = runner(bench(arm(), Arm("theirs", lambda: forward, peer=True, forward_only=True))).run()
    assert {row["pass"] for row in rows_of(results, arm="theirs")} == {"fwd"}
    assert {row["pass"] for row in rows_of(results, arm="own")} == {"fwd", "fwd_train", "bwd", "fwd+bwd"}
    (check,) = results.checks
    assert (check["arm"], check["passed"], set(check["errors"])) == ("theirs", True, {"output0"})
    wrong = runner(
        bench(
            arm(),
            Arm("theirs", lambda: lambda given: (2 * product(given)[0], None), peer=True, forward_only=True),
        )
    ).run()
    assert rows_of(wrong, arm="theirs") == []


def test_kernels_of_known_work_say_what_they_reach():
    def kernel_work(shape, name):
        return Work(flops=4e9, nbytes=3e6) if name == "scan" else None

    ceilings = Ceilings(nbytes_per_s=4e9, flops_per_s=8e12)
    op_bench = bench(arm(), arm("other", peer=True), kernel_work=kernel_work)
    results = runner(op_bench, passes=("bwd",), ceilings=ceilings).run()
    scan, prep = (entry for entry in results.kernels if entry["arm"] == "own")
    # Two launches in 3 ms: 1.5 ms each, of which the bytes need 0.75 and the products 0.5.
    assert (scan["bytes"], scan["flops"]) == (3e6, 4e9)
    assert (scan["of_copy"], scan["of_matmul"]) == (0.5, pytest.approx(1 / 3, abs=1e-4))
    assert "bytes" not in prep
    assert not any("bytes" in entry for entry in results.kernels if entry["arm"] == "other")


def test_one_thread_is_the_engines_own_no_longer():
    meter, seen = CountingMeter(), []

    def sample(prepare, run):
        seen.append(torch._C._is_multithreading_enabled())
        return 1.0, 10.0

    meter.sample = sample
    (row,) = rows_of(runner(bench(arm()), passes=("bwd",), meter=meter).run(), arm="own")
    assert seen == [True] * 5 + [False] * 7
    assert (row["host_us"], row["host_one_thread_us"]) == (10.0, 10.0)
    assert torch._C._is_multithreading_enabled()


def test_in_a_row_an_arms_calls_follow_one_another():
    contenders = [Contender(arm(name), None, product) for name in ("own", "other")]
    meter = CountingMeter()
    own, other = measure("fwd", inputs(SMALL, CPU, 0), contenders, meter, warmups=2, samples=3, profiles=0)
    # Ten samples in turn came before; the first one in a row isn't counted.
    assert own.hosts_in_a_row == [120.0, 130.0, 140.0]
    assert other.hosts_in_a_row == [160.0, 170.0, 180.0]
    assert (own.host_in_a_row_us, own.host_one_thread_us) == (130.0, None)
