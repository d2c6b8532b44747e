"""The node that plays recordings, with an op whose kernels are Python functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from cake.core import loader, played, recording, split_projection
from cake.core.calls import Planned
from cake.core.recording import Recording, empty, known, launch
from cake.core.sequences import Sequences, packed, packed_on_device
from cake.core.tables import plan_tables

CPU = torch.device("cpu")
DTYPES = {(0, 32): torch.int32, (0, 64): torch.int64, (1, 8): torch.uint8, (2, 32): torch.float32}


def toy_recording(_: int, __: int, arguments: Any, views: Any, calls: Any) -> Any:
    """What `record` of recording_host.cuh gives."""

    def play(*given: Any) -> str | None:
        for wanted, x in zip(arguments, given, strict=True):
            if wanted and (x.dtype, tuple(x.shape)) != (DTYPES[wanted[2], wanted[3]], tuple(wanted[4:])):
                return f"{wanted[0]} must be otherwise"

        def found(x: Any) -> Any:
            if type(x) is not tuple:
                return x
            if x[0] == "argument":
                return given[x[1]]
            argument, first, code, bits, *shape = views[x[1]]
            count = torch.Size(shape).numel() * bits // 8
            return given[argument][first : first + count].view(DTYPES[code, bits]).view(shape)

        for entry, *operands in calls:
            entry(*map(found, operands))
        return None

    return play


LIBRARY = SimpleNamespace(
    toy_recording=toy_recording,
    product=lambda q, k, t, _: t.copy_(q * k),
    add=lambda t, v, scale, o, _: o.copy_(scale * (t + v)),
    walk=lambda do, scale, y, _: y.copy_(scale * do),
    out=lambda q, k, y, dq, dk, _: (dq.copy_(y * k), dk.copy_(y * q)),
    plan=lambda words, *_: words.zero_(),
)


@dataclass(frozen=True)
class Call(Planned):
    seqs: Sequences
    segments: None = None
    scale: float = 3.0
    tape: str = "states"
    differentiable: bool = True
    recordings: dict[Any, Recording] = field(default_factory=dict, init=False, compare=False)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran stage by stage, which is when a call is first seen."""
    for module in ("recording", "tables"):
        monkeypatch.setattr(f"cake.core.{module}.stream_of", lambda device: 0)
    monkeypatch.setattr("cake.core.tables._capturing", lambda device: False)
    seen: list[str] = []

    def forward(call: Call, inputs: Any, tape: str) -> Any:
        seen.append("forward")
        q, k, v, _ = inputs
        t, o = empty(q.shape, q.dtype, CPU), empty(v.shape, v.dtype, CPU)
        TOY.stages().tables(call.seqs, CPU)
        launch(LIBRARY, "product", CPU, q, k, t)
        launch(LIBRARY, "add", CPU, t, v, call.scale, o)
        return (o, None), (t,)

    def backward(call: Call, inputs: Any, do: Any, dht: Any, pieces: Any, wanted: Any, into: Any) -> Any:
        seen.append("backward")
        q, k, v, state = inputs
        assert (pieces is None) == (call.tape == "inputs")
        assert (state is None) or state.shape == (2,)
        assert known("plan") is not None or call.tape == "inputs"
        dq, dk, y = into or [empty(x.shape, x.dtype, CPU) for x in (q, k, v)]
        launch(LIBRARY, "walk", CPU, do, call.scale, y)
        launch(LIBRARY, "out", CPU, q, k, y, dq, dk)
        return dq, dk, y, None

    global TOY
    TOY = played.Op(
        name="toy",
        inputs=("q", "k", "v", "state"),
        rows=(),
        laid=("q", "k", "v"),
        stages=lambda: SimpleNamespace(
            library=lambda: LIBRARY,
            tables=lambda seqs, device: plan_tables(seqs, device, lambda: (LIBRARY.plan,) * 3),
        ),
        kept=lambda tape: (True, True, True, tape == "inputs"),
        forward=forward,
        backward=backward,
    )
    return seen


TOY: Any = None
BOUNDS = (0, 2, 6)
STATE = torch.ones(2)


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 6, 4, generator=random).requires_grad_() for _ in range(3))


def check(call: Call, given: Any, boundaries: Any = None, state: Any = STATE) -> None:
    """A call and its gradients, against autograd's own."""
    q, k, v = given
    o, final_state = played.run(TOY, call, (*given, state), boundaries)
    assert final_state is None
    expected = call.scale * (q * k + v)
    assert torch.equal(o, expected)
    do = torch.randn(1, 6, 4)
    got = torch.autograd.grad(o, given, do)
    for a, b in zip(got, torch.autograd.grad(expected, given, do), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("tape", ["inputs", "states"])
def test_stages_run_once_for_calls_that_are_alike(stages: list[str], tape: str) -> None:
    call = Call(packed(BOUNDS, 6), tape=tape)
    for seed in range(3):
        check(call, inputs(seed))
    assert stages == ["forward", "backward"]
    loader.release()
    check(call, inputs())
    assert stages == ["forward", "backward"] * 2


def test_boundaries_on_the_device_are_the_calls_own(stages: list[str]) -> None:
    cu = torch.tensor(BOUNDS, dtype=torch.int32)
    call = Call(packed_on_device(cu, 6)).at(None)
    check(call, inputs(), cu)
    check(call, inputs(), cu.clone())
    q, k, v = inputs()
    o, _ = played.run(TOY, call, (q, k, v, STATE), cu)
    cu[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_gradients_lie_where_their_inputs_lay(stages: list[str]) -> None:
    x = torch.randn(1, 6, 12, requires_grad=True)
    call = Call(packed(BOUNDS, 6))
    q, k, v = split_projection(x, 4, 4, 4)
    o, _ = played.run(TOY, call, (q, k, v, None), None)
    o.sum().backward()
    a, b, c = x.detach().requires_grad_().split(4, -1)
    assert torch.allclose(x.grad, torch.cat([3 * b, 3 * a, torch.full_like(c, 3.0)], -1))


def test_wanted_alone(stages: list[str]) -> None:
    q, k, v = (x.detach() for x in inputs())
    o, _ = played.run(TOY, Call(packed(BOUNDS, 6)), (q, k.requires_grad_(), v, None), None)
    o.sum().backward()
    assert torch.allclose(k.grad, 3 * q)
    assert q.grad is v.grad is None


def test_a_checkpoint_replays_it(stages: list[str]) -> None:
    call, given = Call(packed(BOUNDS, 6)), inputs()
    o = checkpoint(lambda *x: played.run(TOY, call, (*x, None), None)[0], *given, use_reentrant=False)
    o.sum().backward()
    assert torch.allclose(given[0].grad, 3 * given[1])


def test_a_tensor_that_came_back_otherwise_is_refused(stages: list[str]) -> None:
    call, given = Call(packed(BOUNDS, 6)), inputs()

    def refused(spoil: Any, name: str) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, spoil):
            o, _ = played.run(TOY, call, (*given, None), None)
        with pytest.raises(RuntimeError, match=f"the backward's saved {name} must be"):
            o.sum().backward()

    for _ in range(2):  # before and after the first backward that is right
        refused(lambda x: x.double(), "q")
        refused(lambda x: x[:-1] if x.dtype is torch.uint8 else x, "tape")
        refused(lambda x: x[:-1] if x.dtype is torch.int32 else x, "plan")
        check(call, given, state=None)
    with pytest.raises(recording.Otherwise):
        played.run(TOY, call, (given[0].double(), *given[1:], None), None)


def test_no_gradient_of_a_gradient(stages: list[str]) -> None:
    given = inputs()
    o, _ = played.run(TOY, Call(packed(BOUNDS, 6)), (*given, None), None)
    (dq,) = torch.autograd.grad((o * o).sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_a_transform_of_functorch_is_refused_as_by_any_such_node(stages: list[str]) -> None:
    q, k, v = (x.detach() for x in inputs())
    call = Call(packed(BOUNDS, 6))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return played.run(TOY, call, (x, k, v, None), None)[0].sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(loss)(q)
    # A kernel would take it for a constant.
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got a dual tensor q"):
        loss(forward_ad.make_dual(q, q))
    with pytest.raises(NotImplementedError, match="got a dual tensor q"):
        torch.func.jvp(loss, (q,), (q,))
    check(call, inputs(), state=None)
