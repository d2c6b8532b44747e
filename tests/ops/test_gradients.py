"""The autograd contract: which gradients are made, from which losses, and that nothing else changes them."""

from __future__ import annotations

import pytest
import torch

from cake.core.testing import assert_bitwise_equal, spread_view

NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def leaves(case, *wanted):
    return {name: x.detach().requires_grad_(name in wanted) for name, x in case.tensors().items()}


@pytest.fixture
def run(op):
    def chunk(case, tensors, *, final=True, **arguments):
        return op.chunk(
            **tensors,
            output_final_state=final,
            use_qk_l2norm_in_kernel=case.l2norm,
            cu_seqlens_cpu=case.boundaries,
            **arguments,
        )

    return chunk


def test_loss_on_the_final_state_alone(make, call, assert_accurate):
    case = make((70, 1, 129)).replace(do=None)
    got = call(case)
    del got["o"]
    assert_accurate(case, got)


def test_loss_on_the_final_state_alone_without_an_initial_one(make, call, assert_accurate):
    case = make((70, 1, 129)).replace(do=None, initial_state=None)
    got = call(case)
    del got["o"]
    assert not got["dq"].any()
    assert_accurate(case, got)


def test_an_unused_final_state_changes_no_bit(make, call, assert_same_bits):
    case = make((100, 33)).replace(dht=None)
    without, unused = call(case, final=False), call(case, final=True)
    del unused["ht"]
    assert_same_bits(unused, without)


def test_the_same_state_gradient_of_zero_changes_no_value(make, call):
    case = make((100, 33))
    without, zero = call(case.replace(dht=None), final=False), call(case.replace(dht=0 * case.dht))
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dh0"):
        assert torch.equal(zero[name], without[name]), name


@pytest.mark.parametrize("wanted", NAMES)
def test_one_input_alone(run, make, wanted, tape):
    case = make((65, 20))
    every, one = leaves(case, *NAMES), leaves(case, wanted)
    for tensors in (every, one):
        o, ht = run(case, tensors, **tape)
        torch.autograd.backward((o, ht), (case.do, case.dht))
    assert_bitwise_equal(wanted, one[wanted].grad, every[wanted].grad)
    assert [name for name, x in one.items() if x.grad is not None] == [wanted]


def test_gradients_look_like_their_inputs(run, make):
    case = make((65, 20), beta_dtype=torch.bfloat16, g_dtype=torch.bfloat16)
    tensors = leaves(case, *NAMES)
    o, ht = run(case, tensors)
    (o.float().sum() + ht.sum()).backward()
    for name, x in tensors.items():
        assert x.grad.shape == x.shape, name
        assert x.grad.dtype == x.dtype, name
        assert x.grad.device == x.device, name


def test_backward_twice(run, make, tape):
    case = make((65, 20))
    tensors = leaves(case, *NAMES)
    o, ht = run(case, tensors, **tape)
    inputs = list(tensors.values())
    first = torch.autograd.grad((o, ht), inputs, (case.do, case.dht), retain_graph=True)
    second = torch.autograd.grad((o, ht), inputs, (case.do, case.dht))
    for name, a, b in zip(tensors, first, second, strict=True):
        assert_bitwise_equal(name, a, b)


def test_without_grad_there_is_no_graph(run, make):
    case = make((65, 20))
    tensors = leaves(case, *NAMES)
    with torch.no_grad():
        o, ht = run(case, tensors)
    assert not o.requires_grad
    assert not ht.requires_grad
    o, ht = run(case, leaves(case))
    assert not o.requires_grad
    assert not ht.requires_grad


def test_no_second_derivative(run, make):
    case = make((20,))
    tensors = leaves(case, *NAMES)
    o, _ = run(case, tensors)
    (dv,) = torch.autograd.grad(o.float().square().sum(), tensors["v"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        dv.sum().backward()


@pytest.mark.parametrize("lengths", [(1, 63), (64, 64), (37, 200)], ids=str)
def test_chained_calls_are_one_call(op, make, assert_accurate, lengths):
    case = make((sum(lengths),))
    tensors = leaves(case, *NAMES)
    state, outputs = tensors["initial_state"], []
    for start, end in ((0, lengths[0]), (lengths[0], sum(lengths))):
        part = {name: tensors[name][:, start:end] for name in NAMES[:5]}
        o, state = op.chunk(
            **part, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        outputs.append(o)
    o = torch.cat(outputs, 1)
    gradients = torch.autograd.grad((o, state), list(tensors.values()), (case.do, case.dht))
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
    got = {"o": o.detach(), "ht": state.detach()} | dict(zip(names, gradients, strict=True))
    assert_accurate(case, got)


def test_gradients_arrive_through_a_loop(run, make):
    # Two uses of one input: autograd sums what two calls return.
    case = make((40,))
    tensors = leaves(case, "v")
    o, _ = run(case, tensors)
    twice, _ = run(case, tensors)
    (once,) = torch.autograd.grad(o, tensors["v"], case.do, retain_graph=True)
    (both,) = torch.autograd.grad((o, twice), tensors["v"], (case.do, case.do))
    assert torch.equal(both, 2 * once)


def test_inputs_changed_before_the_backward(run, make):
    case = make((40,))
    tensors = leaves(case, "q", "k", "v")
    values = tensors["v"] * 1
    o, _ = run(case, tensors | {"v": values})
    with torch.no_grad():
        values.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.float().sum().backward()


@pytest.fixture
def handed_to_adj(op, monkeypatch):
    """The (do, dht) that backwards hand to the adjoint stage."""
    seen = []
    stages = op.module("_stages")
    original = stages.stages

    class Watched:
        def __init__(self, backend):
            self.module = original(backend)

        def __getattr__(self, stage):
            return getattr(self.module, stage)

        def adj(self, *arguments, dht=None, **named):
            seen.append((arguments[2 if op.name == "gdn" else 0], dht))
            return self.module.adj(*arguments, dht=dht, **named)

    monkeypatch.setattr(stages, "stages", Watched)
    # A GPU's stages see tensors once, when a call is recorded, and then no memory.
    monkeypatch.setattr(op.module("_autograd").Call, "played", property(lambda call: False))
    return seen


class TestWhatTheStagesGet:
    def test_no_gradient_for_an_unused_final_state(self, make, call, handed_to_adj):
        call(make((70,)).replace(dht=None), final=True)
        ((_, dht),) = handed_to_adj
        assert dht is None

    def test_contiguous_rows(self, make, call, handed_to_adj):
        case = make((70,))
        for do in (case.do[..., :1].expand_as(case.do), spread_view(case.do), case.do):
            call(case.replace(do=do, dht=case.dht.mT))
        for do, dht in handed_to_adj:
            assert do.stride(-1) == 1
            assert dht.is_contiguous()
        # No copy where none is needed.
        assert handed_to_adj[-1][0].data_ptr() == case.do.data_ptr()


class NoLaunch:
    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        if name in ("library", "tables"):
            return getattr(self.module, name)
        pytest.fail(f"{name} was launched")


@pytest.mark.parametrize("spoil", ["shape", "dtype"])
def test_saved_tensors_are_checked_before_a_launch(run, op, make, monkeypatch, tape, spoil):
    # Hooks (offloading, checkpoints) may hand back anything: too short a tape would be read past its end.
    case = make((130,))

    def spoiled(x):
        if spoil == "dtype":
            return x.to(torch.float64)
        return x[:-1] if x.shape[0] > 1 else x[..., :-1]

    def results(index):
        saved = []

        def pack(x):
            saved.append(x)
            return len(saved) - 1, x

        with torch.autograd.graph.saved_tensors_hooks(
            pack, lambda packed: spoiled(packed[1]) if packed[0] == index else packed[1]
        ):
            o, ht = run(case, leaves(case, *NAMES), **tape)
        return o, ht, len(saved)

    o, ht, count = results(None)
    assert count >= 6
    torch.autograd.backward((o, ht), (case.do, case.dht))
    for index in range(count):
        o, ht, _ = results(index)
        with monkeypatch.context() as patch:
            patch.setattr(op.module("_stages"), "stages", lambda backend: NoLaunch(op.module(f"_{backend}")))
            with pytest.raises(RuntimeError, match=r"saved \w+ must be"):
                torch.autograd.backward((o, ht), (case.do, case.dht))
