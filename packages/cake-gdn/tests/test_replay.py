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
from cake.gdn import _route, _stages, api, chunk_gated_delta_rule, last_route

SELECT = {"linear_attention_backend": "cake"}


@pytest.fixture
def launches(monkeypatch):
    """The stages that ran, in order. A GPU's run when a call is first seen, so nothing has been seen yet."""
    names = []
    original = _stages.stages
    monkeypatch.setattr(api, "_calls", Memo())

    class Recorded:
        def __init__(self, backend):
            self.backend, self.module = backend, original(backend)

        def __getattr__(self, stage):
            if stage not in ("library", "tables"):
                names.append(stage)
            return getattr(self.module, stage)

    monkeypatch.setattr(_stages, "stages", Recorded)
    return names


@pytest.fixture
def layer(make):
    case = make((70, 65), heads=(1, 2))
    inputs = [x.detach().requires_grad_() for x in case.tensors().values()]

    def run(*tensors, **arguments):
        q, k, v, g, beta, state = tensors
        return chunk_gated_delta_rule(
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


class TestTape:
    def test_saved(self, layer, launches):
        case, inputs, run = layer
        gradients(case, inputs, run(*inputs, recompute_state=False))
        assert launches == ["prep", "scan", "adj", "out"]

    def test_recomputed(self, layer, launches):
        case, inputs, run = layer
        gradients(case, inputs, run(*inputs, recompute_state=True))
        assert launches == ["prep", "scan", "prep", "scan", "adj", "out"]

    def test_the_state_alone_skips_a_stage(self, layer, launches):
        case, inputs, run = layer
        inputs = [x.detach() for x in inputs]
        results = run(*inputs[:5], inputs[5].requires_grad_())
        torch.autograd.grad(results, inputs[5], (case.do, case.dht))
        assert launches == ["prep", "scan", "adj"]

    def test_recomputing_saves_inputs_alone(self, layer, device):
        _, inputs, run = layer

        def saved(recompute):
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
                run(*inputs, recompute_state=recompute)
            return kept

        pointers = {x.data_ptr() for x in inputs}
        assert {x.data_ptr() for x in saved(True)} <= pointers
        tape = {(2, 135, 64), (2, 135), (1, 135), (4, 2, 128, 128)}
        if device.type == "cuda":  # in one piece
            tape = {(2 * 135 * 132 + 135 * 4 + 4 * 2 * 128 * 256,)}
        assert {tuple(x.shape) for x in saved(False)} >= tape


class TestConfiguration:
    @pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
    def test_a_backward_runs_what_its_forward_ran(self, layer, launches, recompute):
        case, inputs, run = layer
        expected = gradients(case, inputs, run(*inputs))
        launches.clear()
        with config.temporary({**SELECT, "cake_gdn_variant": "fast", "cake_gdn_recompute_state": recompute}):
            results = run(*inputs)
            route = last_route()
        assert (route.variant, route.recompute_state) == ("fast", recompute)
        with config.temporary(
            {**SELECT, "cake_gdn_variant": "det", "cake_gdn_recompute_state": not recompute}
        ):
            got = gradients(case, inputs, results)
        assert launches.count("scan") == (2 if recompute else 1)
        assert_equal(got, expected)

    def test_deterministic_algorithms_switched_on_in_between(self, layer):
        case, inputs, run = layer
        results = run(*inputs, variant="fast")
        torch.use_deterministic_algorithms(True)
        try:
            gradients(case, inputs, results)
            with pytest.raises(ConfigError, match="use_deterministic_algorithms"):
                run(*inputs, variant="fast")
            run(*inputs)
            assert last_route().variant == "det"
        finally:
            torch.use_deterministic_algorithms(False)

    def test_unconfigured_is_det(self, layer):
        _, inputs, run = layer
        run(*inputs)
        assert last_route().variant == "det"

    def test_the_call_wins(self, layer):
        _, inputs, run = layer
        with config.temporary({**SELECT, "cake_gdn_variant": "fast", "cake_gdn_recompute_state": True}):
            run(*inputs, variant="det", recompute_state=False)
        assert (last_route().variant, last_route().recompute_state) == ("det", False)


class TestReplay:
    def test_without_grad_and_with_it(self, layer):
        _, inputs, run = layer
        with torch.no_grad():
            first = run(*inputs)
            route = last_route()
        assert_equal(run(*inputs), first)
        assert last_route() == route

    @pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
    @pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
    def test_checkpoint(self, layer, reentrant, recompute):
        case, inputs, run = layer
        results = run(*inputs)
        expected = gradients(case, inputs, results)
        leaves = [x.detach().requires_grad_() for x in inputs]
        replayed = checkpoint(
            lambda *tensors: run(*tensors, recompute_state=recompute), *leaves, use_reentrant=reentrant
        )
        route = last_route()
        assert_equal(replayed, results)
        torch.autograd.backward(replayed, (case.do, case.dht))
        assert_equal([x.grad for x in leaves], expected)
        assert last_route() == route

    def test_the_same_tensors_are_saved(self, layer):
        _, inputs, run = layer

        def saved():
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
                run(*inputs)
            return [(tuple(x.shape), x.dtype) for x in kept]

        assert saved() == saved()

    def test_offloaded(self, layer):
        case, inputs, run = layer
        expected = gradients(case, inputs, run(*inputs))
        with torch.autograd.graph.save_on_cpu():
            results = run(*inputs)
        assert_equal(gradients(case, inputs, results), expected)


class TestRoute:
    def test_what_it_says(self, layer, device):
        _, inputs, run = layer
        run(*inputs)
        route = last_route()
        assert route.path == "single"
        assert route.backend == ("cuda" if device.type == "cuda" else "torch")
        assert str(route) == f"single rank, det, {route.backend}, states saved"

    def test_one_line_for_each_new_route(self, layer, caplog, monkeypatch):
        _, inputs, run = layer
        monkeypatch.setattr(_route._routes, "_seen", set())
        with caplog.at_level(logging.INFO, logger="cake"):
            for variant in ("det", "det", "fast", "det", "fast"):
                run(*inputs, variant=variant)
        lines = [record.getMessage() for record in caplog.records if record.name == "cake"]
        assert [line.split(",")[1] for line in lines] == [" det", " fast"]
        assert lines[0].startswith("gdn runs: single rank")
