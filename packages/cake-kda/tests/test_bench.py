"""What ``cake bench kda`` is made of: shapes, inputs, the floor, and the whole on a CPU."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from cake.core.bench import CEILINGS, Bench
from cake.core.cli import main
from cake.core.testing import assert_bitwise_equal, relative_error
from cake.kda.bench import BENCH, SHAPES, bounded, chunks, inputs, kernel_work, work

CPU = torch.device("cpu")
H200 = CEILINGS["NVIDIA H200"]


def test_floors_agree_with_hand_counts():
    # H=64, 16384 tokens: 16384 chunks times heads. Forward 10.1 MFLOP each; q, k, v, g and o of 16 KB each.
    shape = BENCH.shape("h64-1x16384")
    forward = work(shape, "fwd", None)
    assert forward.flops / H200.flops_per_s * 1e3 == pytest.approx(0.209, rel=0.02)
    assert forward.nbytes / H200.nbytes_per_s * 1e3 == pytest.approx(16384 * 5 * 16384 / 4.3e9, rel=0.01)
    training = work(shape, "fwd_train", "save")
    assert training.nbytes - forward.nbytes == (16384 - 64) * 32768
    assert work(shape, "fwd_train", "recompute") == forward


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


def test_chunks_restart_at_every_sequence():
    assert chunks(BENCH.shape("tiny")) == 2 + 1
    assert chunks(BENCH.shape("h64-1x16384")) == 256


def test_shapes_are_distinct_and_as_long_as_they_say():
    tokens = {shape.name: shape.tokens for shape in SHAPES}
    assert len(tokens) == len(SHAPES) == 15
    assert tokens["h32-4docs"] == 131072
    assert tokens["h4-4x16384"] == 65536
    assert tokens["h64-1x16384"] == tokens["h64-4docs"] == tokens["h64-4docs-free"] == 16384
    assert tokens["h64-8x4096"] == tokens["h32-M"] == 32768
    assert [shape.name for shape in BENCH.default_shapes("cpu")] == ["tiny", "tiny-free"]
    assert len(BENCH.default_shapes("cuda")) == 12
    assert sum(not bounded(shape) for shape in SHAPES) == 4


def test_inputs_are_those_of_a_training_step():
    shape = BENCH.shape("tiny")
    given = inputs(shape, CPU, 3)
    x = given.tensors
    assert list(given.leaves) == ["q", "k", "v", "g", "beta", "A_log", "dt_bias"]
    assert [x[name].dtype for name in ("q", "k", "v", "g", "beta")] == [torch.bfloat16] * 5
    assert (x["v"].shape, x["g"].shape, x["beta"].shape) == ((1, 100, 2, 128), (1, 100, 2, 128), (1, 100, 2))
    assert (x["A_log"].shape, x["dt_bias"].shape) == ((2,), (256,))
    assert x["cu_seqlens"].tolist() == [0, 70, 100]
    again = inputs(shape, CPU, 3).tensors
    for name in x:
        assert_bitwise_equal(name, x[name].detach(), again[name].detach())
    assert not torch.equal(x["q"], inputs(shape, CPU, 4).tensors["q"])


def test_the_truth_is_autograds():
    for name in ("tiny", "tiny-free"):
        given = inputs(BENCH.shape(name), CPU, 1)
        truth = BENCH.reference(given)
        leaves = {n: given.tensors[n].detach().double().requires_grad_() for n in ("g", "A_log", "dt_bias")}
        x = leaves["g"] + leaves["dt_bias"].view(2, 128)
        rate = leaves["A_log"].exp()[:, None]
        if bounded(given.shape):
            g = -5.0 * (rate * x).sigmoid()
        else:
            g = -rate * torch.nn.functional.softplus(x)
        # What the truth says of the raw gate follows from what it says of the log decay.
        from cake.kda import reference

        plain = [given.tensors[n].detach() for n in ("q", "k", "v")]
        beta = given.tensors["beta"].detach().double().sigmoid()
        grads = reference.backward(
            *plain, g.detach(), beta, given.output_gradients[0], boundaries=given.shape.boundaries
        )
        g.backward(grads.dg)
        for n, x in leaves.items():
            assert relative_error(truth[f"d{n}"], x.grad) < 1e-4, n


def test_arms_and_their_configurations():
    assert isinstance(BENCH, Bench)
    assert [(arm.name, arm.peer, arm.modes, arm.forward_only) for arm in BENCH.arms] == [
        ("cake-det", False, ("save", "recompute"), False),
        ("cake-fast", False, ("save", "recompute"), False),
        ("fla", True, (None,), False),
        ("flashkda", True, (None,), True),
    ]


def test_flashkda_gets_what_it_takes(monkeypatch):
    seen = []

    def fwd(q, k, v, g, beta, scale, out, **named):
        seen.append((out, named))

    module = ModuleType("flash_kda")
    module.fwd = fwd
    monkeypatch.setitem(sys.modules, "flash_kda", module)
    call = next(arm for arm in BENCH.arms if arm.name == "flashkda").load()
    (o,) = call(inputs(BENCH.shape("tiny"), CPU, 0))
    out, named = seen[0]
    assert out is o
    assert named["dt_bias"].shape == (2, 128)
    assert named["cu_seqlens"].dtype == torch.int64
    with pytest.raises(NotImplementedError, match="bounded gates alone"):
        call(inputs(BENCH.shape("tiny-free"), CPU, 0))


def test_the_command_on_a_cpu(tmp_path):
    out = tmp_path / "results.json"
    words = ["bench", "kda", "--device", "cpu", "--samples", "1", "--warmups", "0", "--vs", "flashkda,fla"]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    own = [row for row in found["rows"] if row["arm"] in ("cake-det", "cake-fast")]
    assert len(own) == 2 * 2 * (1 + 3 * 2)
    saved = {
        row["mode"]: row["saved_bytes"] for row in own if row["arm"] == "cake-det" and row["pass"] == "bwd"
    }
    assert saved["recompute"] < saved["save"]
    checks = [check for check in found["checks"] if check["arm"].startswith("cake-")]
    assert [check["against"] for check in checks] == ["reference"] * 8
    for check in checks:
        names = {"output0", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
        assert set(check["errors"]) == names
        assert max(check["errors"].values()) < 2e-2
    assert set(found["header"]["versions"]) >= {"cake-core", "cake-kda", "flash-kda", "torch"}


@pytest.mark.slow  # starts two processes
def test_ranks_are_timed_beside_one(tmp_path):
    out = tmp_path / "results.json"
    words = ["--device", "cpu", "--world-size", "2", "--samples", "1", "--warmups", "0", "--modes", "save"]
    words += ["--variants", "cake-det", "--passes", "fwd+bwd", "--layouts", "zigzag", "--shapes", "tiny-free"]
    assert main(["bench", "kda", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    arms = [(row["arm"], row["world_size"], row["layout"]) for row in found["rows"]]
    assert arms == [("cake-det", 1, None), ("cake-det x2 zigzag", 2, "zigzag")]
    (check,) = found["checks"]
    # Gradients of parameters are sums over ranks.
    assert set(check["errors"]) == {"output0", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
    assert check["passed"]
    assert 0 < max(check["errors"].values()) < BENCH.limit


KERNELS = {
    "void cake::kda::prep_kernel<...>(cake::kda::PrepArgs)": (0.44, 0.03),
    "void cake::kda::scan_kernel<1, true, false>(cake::kda::WalkArgs)": (0.38, 0.17),
    "void cake::kda::scan_kernel<2, true, true>(cake::kda::WalkArgs)": (0.50, 0.17),
    "void cake::kda::scan_kernel<2, false, true>(cake::kda::WalkArgs)": (0.35, 0.11),
    "void cake::kda::adj_kernel<2>(cake::kda::WalkArgs)": (0.50, 0.17),
    "cake::kda::out_kernel(cake::kda::OutArgs)": (0.90, 0.3),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_kernels_work_agrees_with_hand_counts(name):
    found = kernel_work(BENCH.shape("h64-1x16384"), name)
    assert found is not None
    byte_ms, flop_ms = KERNELS[name]
    assert found.nbytes / H200.nbytes_per_s * 1e3 == pytest.approx(byte_ms, abs=0.01)
    assert found.flops / H200.flops_per_s * 1e3 == pytest.approx(flop_ms, abs=0.01)


def test_what_depends_on_values_has_no_work():
    name = "void cake::kda::transfer_kernel<1>(cake::kda::TransferArgs)"
    assert kernel_work(BENCH.shape("h64-1x16384"), name) is None
