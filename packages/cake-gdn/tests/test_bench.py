"""What ``cake bench gdn`` is made of: shapes, inputs, the floor, and the whole on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from cake.core.bench import CEILINGS, Bench
from cake.core.cli import main
from cake.core.testing import assert_bitwise_equal
from cake.gdn.bench import BENCH, SHAPES, chunks, inputs, kernel_work, work

CPU = torch.device("cpu")
H200 = CEILINGS["NVIDIA H200"]

# (FLOP ms, byte ms) of fwd without a tape, fwd with it, bwd with it, and bwd without, worked out by hand to
# two or three digits. A recomputing backward here keeps no inverses either.
FLOORS = {
    "M": ((0.295, 0.254), (0.295, 0.489), (0.76, 0.65), (0.95, 0.41)),
    "h16v32-1x32768": ((0.203, 0.189), (0.203, 0.345), (0.51, 0.47), (0.64, 0.32)),
    "h2v8-1x32768": ((0.048, 0.040), (0.048, 0.079), (0.126, 0.10), (0.157, 0.063)),
}
PASSES = (("fwd", None), ("fwd_train", "save"), ("bwd", "save"), ("bwd", "recompute"))


@pytest.mark.parametrize("name", FLOORS)
def test_floors_agree_with_hand_counts(name):
    for (which, mode), (flop_ms, byte_ms) in zip(PASSES, FLOORS[name], strict=True):
        found = work(BENCH.shape(name), which, mode)
        assert found.flops / H200.flops_per_s * 1e3 == pytest.approx(flop_ms, rel=0.02)
        assert found.nbytes / H200.nbytes_per_s * 1e3 == pytest.approx(byte_ms, rel=0.03)


def test_bytes_of_a_forward_without_a_tape_are_its_tensors():
    shape = BENCH.shape("tiny")
    given = inputs(shape, CPU, 0)
    o = given.output_gradients[0]
    tensors = [given.tensors[name] for name in ("q", "k", "v", "g", "beta")] + [o]
    assert work(shape, "fwd", None).nbytes == sum(x.numel() * x.element_size() for x in tensors)


def test_recomputing_moves_fewer_bytes_and_takes_more_operations():
    for shape in SHAPES:
        save, recompute = work(shape, "bwd", "save"), work(shape, "bwd", "recompute")
        assert recompute.nbytes < save.nbytes
        assert recompute.flops > save.flops
        assert work(shape, "fwd_train", "recompute") == work(shape, "fwd", None)


def test_chunks_restart_at_every_sequence():
    assert chunks(BENCH.shape("tiny")) == 2 + 1
    assert chunks(BENCH.shape("M")) == 514


def test_shapes_are_distinct_and_as_long_as_they_say():
    tokens = {shape.name: shape.tokens for shape in SHAPES}
    assert len(tokens) == len(SHAPES) == 18
    assert tokens["h16v48-4docs"] == 262144
    assert tokens["M"] == tokens["M-repeated"] == tokens["h16v32-4random"] == 32768
    assert tokens["G"] == 131072
    assert tokens["h4v12-rl"] == tokens["h16v32-rl"] == tokens["h32v32-rl"] == 7744
    for shape in SHAPES:
        assert shape.heads[1] % shape.heads[0] == 0
    assert [shape.name for shape in BENCH.default_shapes("cpu")] == ["tiny"]
    assert len(BENCH.default_shapes("cuda")) == 15


def test_inputs_are_those_of_a_training_step():
    shape = BENCH.shape("tiny")
    given = inputs(shape, CPU, 3)
    x = given.tensors
    assert list(given.leaves) == ["q", "k", "v", "g", "beta"]
    assert [x[name].dtype for name in "qkv"] == [torch.bfloat16] * 3
    assert (x["q"].shape, x["v"].shape, x["g"].shape) == ((1, 100, 1, 128), (1, 100, 2, 128), (1, 100, 2))
    assert x["g"].dtype is x["beta"].dtype is torch.float32
    assert x["cu_seqlens"].dtype is torch.int32
    assert x["cu_seqlens"].tolist() == [0, 70, 100]
    assert (x["g"] < 0).all()
    assert (x["beta"] > 0).all()
    assert (x["beta"] < 1).all()
    again = inputs(shape, CPU, 3).tensors
    for name in x:
        assert_bitwise_equal(name, x[name].detach(), again[name].detach())
    assert not torch.equal(x["q"], inputs(shape, CPU, 4).tensors["q"])


def test_gates_are_as_strong_as_in_training():
    g = inputs(BENCH.shape("h4v12-rl"), CPU, 0).tensors["g"].detach()
    assert -80.0 < float(g.min()) < -20.0
    assert -20.0 < float(g.mean()) < -5.0


def test_arms_and_their_configurations():
    assert isinstance(BENCH, Bench)
    assert [(arm.name, arm.peer, arm.modes) for arm in BENCH.arms] == [
        ("cake-det", False, ("save", "recompute")),
        ("cake-fast", False, ("save", "recompute")),
        ("flashqla", True, (None,)),
        ("fla", True, (None,)),
    ]


def test_the_command_on_a_cpu(tmp_path):
    out = tmp_path / "results.json"
    words = ["bench", "gdn", "--device", "cpu", "--samples", "1", "--warmups", "0", "--vs", "flashqla,fla"]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    own = [row for row in found["rows"] if row["arm"] in ("cake-det", "cake-fast")]
    assert len(own) == 2 * (1 + 3 * 2)
    saved = {
        row["mode"]: row["saved_bytes"] for row in own if row["arm"] == "cake-det" and row["pass"] == "bwd"
    }
    assert saved["recompute"] < saved["save"]
    checks = [check for check in found["checks"] if check["arm"].startswith("cake-")]
    assert [check["against"] for check in checks] == ["reference"] * 4
    for check in checks:
        assert set(check["errors"]) == {"output0", "dq", "dk", "dv", "dg", "dbeta"}
        assert max(check["errors"].values()) < 1e-2
    assert set(found["header"]["versions"]) >= {"cake-core", "cake-gdn", "flash-qla", "tilelang", "torch"}


@pytest.mark.slow  # starts two processes
def test_ranks_are_timed_beside_one(tmp_path, capsys):
    out = tmp_path / "results.json"
    words = ["--device", "cpu", "--world-size", "2", "--samples", "1", "--warmups", "0", "--modes", "save"]
    words += ["--variants", "cake-det", "--passes", "fwd,fwd+bwd", "--out", str(out)]
    assert main(["bench", "gdn", *words]) == 0
    found = json.loads(out.read_text())
    arms = {row["arm"]: (row["world_size"], row["layout"]) for row in found["rows"]}
    assert arms == {
        "cake-det": (1, None),
        "cake-det x2 contiguous": (2, "contiguous"),
        "cake-det x2 zigzag": (2, "zigzag"),
    }
    assert len(found["rows"]) == 2 * 3
    assert all(row["wall_ms"] > 0 for row in found["rows"])
    for check in found["checks"]:
        assert set(check["errors"]) == {"output0", "dq", "dk", "dv", "dg", "dbeta"}
        assert check["passed"]
        assert 0 < max(check["errors"].values()) < BENCH.limit
    assert [check["arm"] for check in found["checks"]] == list(arms)[1:]
    assert (found["header"]["world_size"], found["header"]["layouts"]) == (2, ["contiguous", "zigzag"])
    assert "cake-det x2 zigzag" in capsys.readouterr().out


KERNELS = {
    "cake::gdn::prep_kernel(cake::gdn::PrepArgs)": (0.08, 0.02),
    "void cake::gdn::scan_kernel<true, false>(cake::gdn::WalkArgs)": (0.30, 0.28),
    "void cake::gdn::scan_kernel<true, true>(cake::gdn::WalkArgs)": (0.48, 0.28),
    "void cake::gdn::scan_kernel<false, true>(cake::gdn::WalkArgs)": (0.36, 0.16),
    "cake::gdn::adj_kernel(cake::gdn::WalkArgs)": (0.48, 0.28),
    "cake::gdn::out_kernel(cake::gdn::OutArgs)": (0.83, 0.49),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_kernels_work_agrees_with_hand_counts(name):
    found = kernel_work(BENCH.shape("M"), name)
    assert found is not None
    byte_ms, flop_ms = KERNELS[name]
    assert found.nbytes / H200.nbytes_per_s * 1e3 == pytest.approx(byte_ms, abs=0.01)
    assert found.flops / H200.flops_per_s * 1e3 == pytest.approx(flop_ms, abs=0.01)


def test_what_depends_on_values_has_no_work():
    assert kernel_work(BENCH.shape("M"), "cake::gdn::transfer_kernel(cake::gdn::TransferArgs)") is None
