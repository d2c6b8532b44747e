"""Backward and replayed forward run what the first forward ran, whatever is configured meanwhile."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cake.core import config
from cake.core.calls import Memo
from cake.core.errors import ConfigError
from cake.core.testing import assert_bitwise_equal

#: Stages of a backward, by what the forward kept.
BACKWARD = {
    "gdn": {"states": ["adj", "out"], "inputs": ["prep", "scan", "adj", "out"]},
    "kda": {
        "all": ["adj", "out"],
        "states": ["prep", "adj", "out"],
        "inputs": ["prep", "scan", "adj", "out"],
    },
}


def configured(op, variant, recompute):
    return {
        "linear_attention_backend": "cake",
        f"cake_{op.name}_variant": variant,
        f"cake_{op.name}_recompute_state": recompute,
    }


def kept(route):
    """What the route's forward kept, as BACKWARD names it."""
    if hasattr(route, "tape"):
        return route.tape
    return "inputs" if route.recompute_state else "states"


@pytest.fixture
def launches(op, monkeypatch):
    """The stages that ran, in order. A GPU's run when a call is first seen, so nothing has been seen yet."""
    names = []
    original = op.module("_stages").stages
    monkeypatch.setattr(op.module("api"), "_calls", Memo())

    class Recorded:
        def __init__(self, backend):
            self.backend, self.module = backend, original(backend)

        def __getattr__(self, stage):
            if stage not in ("library", "tables"):
                names.append(stage)
            return getattr(self.module, stage)

    monkeypatch.setattr(op.module("_stages"), "stages", Recorded)
    return names


@pytest.fixture
def layer(op, make):
    case = make((70, 65), heads=(1, 2))
    inputs = [x.detach().requires_grad_() for x in case.tensors().values()]

    def run(*tensors, **arguments):
        q, k, v, g, beta, state = tensors
        return op.chunk(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
            **arguments,
        )

    return case, inputs, run


def gradients(case, inputs, results):
    return torch.autograd.grad(results, inputs, (case.do, case.dht))


def assert_equal(got, expected):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_bitwise_equal(f"tensor {i}", a, b)


def saved_by(function, *inputs, **arguments):
    """The tensors that a call keeps."""
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        function(*inputs, **arguments)
    return tensors


class TestTape:
    @pytest.mark.parametrize(
        ("op", "what"), [(op, what) for op, tapes in BACKWARD.items() for what in tapes], indirect=["op"]
    )
    def test_stages(self, op, layer, launches, what):
        case, inputs, run = layer
        gradients(case, inputs, run(*inputs, **op.own.TAPES[what]))
        assert launches == ["prep", "scan", *BACKWARD[op.name][what]]
        assert kept(op.package.last_route()) == what

    def test_the_state_alone_skips_a_stage(self, op, layer, launches):
        case, inputs, run = layer
        inputs = [x.detach() for x in inputs]
        results = run(*inputs[:5], inputs[5].requires_grad_())
        torch.autograd.grad(results, inputs[5], (case.do, case.dht))
        assert [*launches, "out"] == ["prep", "scan", *BACKWARD[op.name]["states"]]

    def test_recomputing_saves_inputs_alone(self, layer):
        _, inputs, run = layer
        pointers = {x.data_ptr() for x in inputs}
        assert {x.data_ptr() for x in saved_by(run, *inputs, recompute_state=True)} <= pointers

    @pytest.mark.parametrize("op", ["gdn"], indirect=True)
    def test_gdn_saves_states_and_chunks(self, layer, device):
        _, inputs, run = layer
        tape = {(2, 135, 64), (2, 135), (1, 135), (4, 2, 128, 128)}
        if device.type == "cuda":  # in one piece
            tape = {(2 * 135 * 132 + 135 * 4 + 4 * 2 * 128 * 256,)}
        assert {tuple(x.shape) for x in saved_by(run, *inputs, recompute_state=False)} >= tape

    @pytest.mark.parametrize("op", ["kda"], indirect=True)
    def test_kda_saves_states_or_everything(self, layer, device):
        _, inputs, run = layer
        pointers = {x.data_ptr() for x in inputs}
        beside, everything = (
            [
                tuple(x.shape)
                for x in saved_by(run, *inputs, disable_recompute=every)
                if x.data_ptr() not in pointers
            ]
            for every in (False, True)
        )
        if device.type == "cuda":  # in one piece; kernels keep whole chunks
            states = 4 * 2 * 128 * 256
            prep = 4 * 2 * 64 * (3 * 256 + 2 * 128) + 4 * 2 * 512 + 2 * 135 * 4
            assert beside[-1] == (states,)
            assert everything[-1] == (states + prep,)
        else:
            assert beside == [(4, 2, 128, 128)]
            prep = {(2, 135, 128), (2, 135, 64), (4, 2, 128), (1, 135)}
            assert set(everything) == {(4, 2, 128, 128), *prep}


class TestConfiguration:
    @pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
    def test_a_backward_runs_what_its_forward_ran(self, op, layer, launches, recompute):
        case, inputs, run = layer
        expected = gradients(case, inputs, run(*inputs))
        launches.clear()
        with config.temporary(configured(op, "fast", recompute)):
            results = run(*inputs)
            route = op.package.last_route()
        assert (route.variant, kept(route)) == ("fast", "inputs" if recompute else "states")
        with config.temporary(configured(op, "det", not recompute)):
            got = gradients(case, inputs, results)
        assert launches.count("scan") == (2 if recompute else 1)
        assert_equal(got, expected)

    def test_deterministic_algorithms_switched_on_in_between(self, op, layer):
        case, inputs, run = layer
        results = run(*inputs, variant="fast")
        torch.use_deterministic_algorithms(True)
        try:
            gradients(case, inputs, results)
            with pytest.raises(ConfigError, match="use_deterministic_algorithms"):
                run(*inputs, variant="fast")
            run(*inputs)
            assert op.package.last_route().variant == "det"
        finally:
            torch.use_deterministic_algorithms(False)

    def test_unconfigured_is_det(self, op, layer):
        _, inputs, run = layer
        run(*inputs)
        assert op.package.last_route().variant == "det"

    def test_the_call_wins(self, op, layer):
        _, inputs, run = layer
        with config.temporary(configured(op, "fast", True)):
            run(*inputs, variant="det", recompute_state=False)
        route = op.package.last_route()
        assert (route.variant, kept(route)) == ("det", "states")


class TestReplay:
    def test_without_grad_and_with_it(self, op, layer):
        _, inputs, run = layer
        with torch.no_grad():
            first = run(*inputs)
            route = op.package.last_route()
        assert_equal(run(*inputs), first)
        assert op.package.last_route() == route

    @pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
    def test_checkpoint(self, op, layer, reentrant, tape):
        case, inputs, run = layer
        results = run(*inputs)
        expected = gradients(case, inputs, results)
        leaves = [x.detach().requires_grad_() for x in inputs]
        replayed = checkpoint(lambda *tensors: run(*tensors, **tape), *leaves, use_reentrant=reentrant)
        route = op.package.last_route()
        assert_equal(replayed, results)
        torch.autograd.backward(replayed, (case.do, case.dht))
        assert_equal([x.grad for x in leaves], expected)
        assert op.package.last_route() == route

    def test_the_same_tensors_are_saved(self, layer):
        _, inputs, run = layer

        def saved():
            return [(tuple(x.shape), x.dtype) for x in saved_by(run, *inputs)]

        assert saved() == saved()

    def test_offloaded(self, layer):
        case, inputs, run = layer
        expected = gradients(case, inputs, run(*inputs))
        with torch.autograd.graph.save_on_cpu():
            results = run(*inputs)
        assert_equal(gradients(case, inputs, results), expected)


class TestRoute:
    def test_what_it_says(self, op, layer, device):
        _, inputs, run = layer
        run(*inputs)
        route = op.package.last_route()
        assert route.path == "single"
        assert route.backend == ("cuda" if device.type == "cuda" else "torch")
        assert str(route) == f"single rank, det, {route.backend}, states saved"

    def test_one_line_for_each_new_route(self, op, layer, caplog, monkeypatch):
        _, inputs, run = layer
        monkeypatch.setattr(op.module("_route")._routes, "_seen", set())
        with caplog.at_level(logging.INFO, logger="cake"):
            for variant in ("det", "det", "fast", "det", "fast"):
                run(*inputs, variant=variant)
        lines = [record.getMessage() for record in caplog.records if record.name == "cake"]
        assert [line.split(",")[1] for line in lines] == [" det", " fast"]
        assert lines[0].startswith(f"{op.name} runs: single rank")
