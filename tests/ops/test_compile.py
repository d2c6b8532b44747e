"""The op under tracers: torch.compile, export, checkpoints, dispatch modes. The bits are an eager call's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cake.core import config, tracing
from cake.core.testing import assert_bitwise_equal

NAMES = ("q", "k", "v", "g", "beta")
LENGTHS = (100, 64, 63, 65, 128, 129, 1, 2, 200, 77, 192, 640, 90, 31, 32, 33, 96, 70, 300, 7)


#: Tracing is the same everywhere; these tests show that what was traced runs on a GPU too.
ON_A_GPU_TOO = pytest.mark.parametrize(
    "device",
    [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def layer(op: Any) -> Callable[..., torch.Tensor]:
    """The op with something to fuse before and behind it."""
    chunk = op.chunk

    def fused(q: torch.Tensor, *rest: torch.Tensor, **arguments: Any) -> torch.Tensor:
        o, _ = chunk(2 * q, *rest, use_qk_l2norm_in_kernel=True, **arguments)
        return o.float() * 3

    return fused


@pytest.fixture
def whole(op: Any) -> Callable[..., Any]:
    """The op with every result."""
    chunk = op.chunk

    def every(*tensors: torch.Tensor, **arguments: Any) -> Any:
        return chunk(*tensors, output_final_state=True, **arguments)

    return every


def torch_op(name: str) -> Any:
    return getattr(torch.ops.cake, name).default


def run(function: Callable[..., Any], case: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    """Results and gradients of one call of `function` on the case's tensors."""
    inputs = {name: getattr(case, name).detach().clone().requires_grad_() for name in NAMES}
    for name in ("initial_state", "A_log", "dt_bias"):
        if arguments.get(name) is not None:
            arguments[name] = inputs[name] = arguments[name].detach().clone().requires_grad_()
    if case.boundaries is not None and not {"cu_seqlens", "cu_seqlens_cpu"} & set(arguments):
        arguments["cu_seqlens"] = torch.tensor(case.boundaries, device=case.q.device)
    results = function(*(inputs[name] for name in NAMES), **arguments)
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    generator = torch.Generator().manual_seed(1)
    loss = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    grads = torch.autograd.grad(results, list(inputs.values()), loss)
    found = {f"result {i}": x.detach() for i, x in enumerate(results)}
    return found | {f"d{name}": x for name, x in zip(inputs, grads, strict=True)}


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, x in found.items():
        assert_bitwise_equal(name, x, expected[name])


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"backend": "aot_eager", "fullgraph": True, **options}
    wrapped: Callable[..., Any] = torch.compile(function, **options)
    return wrapped


@pytest.fixture
def walks(op: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every forward walk of the twins."""
    seen: list[str] = []
    scan = op.module("_torch").scan
    monkeypatch.setattr(op.module("_torch"), "scan", lambda *a, **k: seen.append("scan") or scan(*a, **k))
    return seen


@ON_A_GPU_TOO
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_stays_whole_and_keeps_its_bits(layer: Any, make: Any, dynamic: bool) -> None:
    step = compiled(layer, dynamic=dynamic)
    for tokens in (128, 300, 301):
        case = make((tokens - 70, 0, 70), (1, 2))
        assert_same(run(step, case), run(layer, case))


def test_a_graph_names_what_made_it(op: Any, layer: Any, make: Any, tmp_path: Path) -> None:
    """torch keeps graphs on disk: one of another version, with another tape, must not be found again."""
    graphs: list[torch.fx.GraphModule] = []
    step = compiled(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    run(step, make((70,), (1, 2)))
    (node,) = (node for node in graphs[0].graph.nodes if str(node.target) == f"cake.{op.name}")
    shapes = op.module("_shapes")
    assert node.args[-1] == shapes.MADE_BY
    ours = tmp_path / "ours"
    shutil.copytree(Path(shapes.__file__).parent, ours)
    assert tracing.made_by(ours) == shapes.MADE_BY
    (ours / "_stages.py").write_text("# another tape")
    assert tracing.made_by(ours) != shapes.MADE_BY


def test_programs_that_were_exported_without_that_name_run(op: Any, make: Any) -> None:
    """Of versions before the argument."""
    case = make((70,), (1, 2))
    tensors = [getattr(case, name) for name in NAMES]

    class Layer(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return op.chunk(*tensors)[0]

    program = torch.export.export(Layer(), tuple(tensors)).module()
    (node,) = (node for node in program.graph.nodes if node.target is torch_op(op.name))
    node.args = node.args[:-1]
    program.recompile()
    assert_bitwise_equal("o", program(*tensors), op.chunk(*tensors)[0])


@ON_A_GPU_TOO
@pytest.mark.parametrize("boundaries", ["tensor", "list", "none"])
def test_twenty_lengths_need_two_more_compilations_at_most(layer: Any, make: Any, boundaries: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = compiled(layer, backend=counter)
    for i, tokens in enumerate(LENGTHS):
        lengths = (tokens,) if boundaries == "none" else (tokens // 3, tokens - tokens // 3)
        case = make(lengths, (1, 1), batch=1 if boundaries == "none" else None)
        arguments = {"cu_seqlens_cpu": list(case.boundaries)} if boundaries == "list" else {}
        found = run(step, case, **arguments)
        if i % 6 == 0:
            assert_same(found, run(layer, case, **arguments))
    assert counter.frame_count <= 3


@ON_A_GPU_TOO
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("op", "bound"), [("gdn", None), ("kda", None), ("kda", -5.0)], indirect=["op"])
def test_states_gates_and_activations_are_traced(
    whole: Any, make: Any, bound: float | None, recompute: bool
) -> None:
    case = make((70, 64, 1), (1, 2))
    generator = torch.Generator().manual_seed(2)
    arguments = {
        "initial_state": case.initial_state.transpose(-1, -2),
        "use_gate_in_kernel": True,
        "A_log": torch.rand(2, generator=generator).to(case.q.device),
        "dt_bias": torch.rand((2, *case.g.shape[3:]), generator=generator).to(case.q.device),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
        "recompute_state": recompute,
    }
    if bound is not None:
        arguments |= {"safe_gate": True, "lower_bound": bound}
    assert_same(run(compiled(whole), case, **arguments), run(whole, case, **arguments))


@ON_A_GPU_TOO
@pytest.mark.parametrize("arguments", [{}, {"segments": 3}, {"packing_invariant": True}], ids=str)
def test_a_call_is_cut_as_in_eager(whole: Any, make: Any, arguments: dict[str, Any]) -> None:
    """By default the plan cuts the long sequence, though the tracer knows no length."""
    case = make((1100, 70), (1, 1))
    if arguments:  # what is asked for needs boundaries on the host
        arguments = {**arguments, "cu_seqlens_cpu": list(case.boundaries)}
    for given in (arguments, {**arguments, "initial_state": case.initial_state}):
        assert_same(run(compiled(whole, dynamic=True), case, **given), run(whole, case, **given))


@pytest.mark.parametrize("op", ["kda"], indirect=True)
def test_keeping_everything_is_keeping_states(op: Any, make: Any, whole: Any) -> None:
    case = make((70, 30), (1, 2))
    assert_same(run(compiled(whole), case, disable_recompute=True), run(whole, case, disable_recompute=True))
    assert op.package.last_route().tape == "all"
    run(compiled(whole), case, disable_recompute=True)
    assert op.package.last_route().tape == "states"


def test_inductor_keeps_the_bits(whole: Any, op: Any, make: Any) -> None:
    """The default backend: what it fuses is not cake's, so nothing stands before and behind the op here."""
    case = make((70, 30), (1, 2))
    found = run(compiled(whole, backend="inductor"), case)
    assert_same(found, run(whole, case))


@ON_A_GPU_TOO
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(layer: Any, make: Any, device: torch.device, inside: bool) -> None:
    case = make((70, 30), (1, 2))

    def step(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=inside):
            return layer(*tensors, **arguments)

    expected = run(layer, case)
    for function in (step, compiled(step)):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not inside):
            assert_same(run(function, case), expected)


@ON_A_GPU_TOO
@pytest.mark.parametrize("trace", [False, True])
def test_a_checkpoint_replays_the_call(layer: Any, make: Any, trace: bool) -> None:
    def step(*tensors: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        return checkpoint(layer, *tensors, use_reentrant=False, cu_seqlens=cu_seqlens)

    case = make((70, 30), (1, 2))
    assert_same(run(compiled(step) if trace else step, case), run(layer, case))


@ON_A_GPU_TOO
def test_a_reentrant_checkpoint_replays_the_call(layer: Any, make: Any) -> None:
    case = make((70, 30), (1, 2))
    cu_seqlens = torch.tensor(case.boundaries, device=case.q.device)
    inputs = {name: getattr(case, name).detach().clone().requires_grad_() for name in NAMES}
    o = checkpoint(lambda *x: layer(*x, cu_seqlens=cu_seqlens), *inputs.values(), use_reentrant=True)
    o.backward(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o))
    found = {"result 0": o.detach()} | {f"d{name}": x.grad for name, x in inputs.items()}
    assert_same(found, run(layer, case))


def choose(
    policy: CheckpointPolicy, name: str, ctx: Any, called: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    # By name: a policy is asked before the op is first traced, which makes it.
    return policy if str(called) == f"cake.{name}.default" else CheckpointPolicy.PREFER_RECOMPUTE


@ON_A_GPU_TOO
@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_checkpoints_policy_sees_the_op(
    layer: Any,
    op: Any,
    device: torch.device,
    make: Any,
    walks: list[str],
    policy: CheckpointPolicy,
    trace: bool,
) -> None:
    contexts = partial(create_selective_checkpoint_contexts, partial(choose, policy, op.name))

    def step(*tensors: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        return checkpoint(layer, *tensors, use_reentrant=False, context_fn=contexts, cu_seqlens=cu_seqlens)

    case = make((70, 30), (1, 2))
    expected = run(layer, case)
    walks.clear()
    assert_same(run(compiled(step) if trace else step, case), expected)
    if device.type == "cpu":
        assert len(walks) == (1 if policy is CheckpointPolicy.MUST_SAVE else 2)


def test_a_compiled_region_follows_the_configuration(layer: Any, op: Any, make: Any) -> None:
    case = make((70, 30), (1, 2))
    step = compiled(layer)
    for variant, recompute in (("det", False), ("fast", False), ("det", True)):
        config.configure(
            linear_attention_backend="cake",
            **{f"cake_{op.name}_variant": variant, f"cake_{op.name}_recompute_state": recompute},
        )
        run(step, case)
        route = op.package.last_route()
        assert route is not None
        assert route.variant == variant
        assert ("states saved" in str(route)) != recompute


def test_a_traced_fast_is_refused_under_deterministic_algorithms(layer: Any, op: Any, make: Any) -> None:
    case = make((70,), (1, 1))
    step = compiled(layer)
    config.configure(linear_attention_backend="cake", **{f"cake_{op.name}_variant": "fast"})
    run(step, case)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(Exception, match="use_deterministic_algorithms"):
            run(step, case)
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_gradients(layer: Any, make: Any) -> None:
    case = make((70, 30), (1, 2))
    inputs = [getattr(case, name) for name in NAMES]
    cu_seqlens = torch.tensor(case.boundaries, device=case.q.device)
    with torch.no_grad():
        found, expected = (f(*inputs, cu_seqlens=cu_seqlens) for f in (compiled(layer), layer))
    assert_bitwise_equal("o", found, expected)


class Layer(torch.nn.Module):
    def __init__(self, layer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.layer(*tensors, cu_seqlens=cu_seqlens)


def test_export_keeps_the_op(layer: Any, op: Any, make: Any) -> None:
    case = make((70, 30), (1, 2))
    inputs = tuple(getattr(case, name) for name in NAMES)
    given = {"cu_seqlens": torch.tensor(case.boundaries, device=case.q.device)}
    exported = torch.export.export(Layer(layer), inputs, given)
    assert torch_op(op.name) in [node.target for node in exported.graph.nodes]
    with torch.no_grad():
        assert_bitwise_equal("o", exported.module()(*inputs, **given), layer(*inputs, **given))


def test_fake_tensors_have_the_shapes(op: Any, device: torch.device) -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 100, 3, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
        v = torch.empty(2, 100, 6, 128, dtype=torch.bfloat16, device=device)
        g = torch.empty(2, 100, 6, *[128] * (op.name == "kda"), device=device)
        beta = torch.empty(2, 100, 6, device=device)
        o, state = op.chunk(q, k, v, g, beta, output_final_state=True)
    assert (o.shape, o.dtype, o.device) == (v.shape, v.dtype, v.device)
    assert state is not None
    assert (state.shape, state.dtype) == ((2, 6, 128, 128), torch.float32)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_an_eager_call_goes_straight_to_its_stages(
    layer: Any, op: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make((70, 30), (1, 2))
    expected = run(layer, case)
    with Watch() as watch:
        assert_same(run(layer, case), expected)
    assert {torch_op(op.name), torch_op(f"{op.name}_backward")} <= set(watch.seen)
    monkeypatch.setattr(op.module("_ops"), "call", None)
    assert_same(run(layer, case), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {"beta": t["beta"][..., :1]},
            r"beta must be \[B, T, HV\]=\[1, 100, 2\], got \[1, 100, 1\]",
        ),
        (lambda t: {"q": t["q"].float()}, "q must be bfloat16, got float32"),
        (lambda t: {"A_log": torch.zeros(2)}, "A_log is used by use_gate_in_kernel=True alone"),
        (lambda t: {"cu_seqlens_cpu": [0, 60, 99]}, "cu_seqlens_cpu must end at T=100, got 99"),
        (lambda t: {"cu_seqlens": torch.tensor([[0, 100]])}, r"cu_seqlens must be \[N \+ 1\]"),
        (lambda t: {"chunk_size": 32}, "chunk_size must be 64, got 32"),
    ],
)
def test_refusals_say_what_eager_ones_say(
    op: Any, make: Any, change: Callable[..., Any], message: str
) -> None:
    case = make((100,), (1, 2), batch=1)
    tensors = {name: getattr(case, name) for name in NAMES}
    given = {**tensors, **change(tensors)}
    for function in (op.chunk, compiled(op.chunk)):
        with pytest.raises(Exception, match=message):
            function(**given)


@pytest.mark.parametrize("form", ["batch", "packed", "packed on the host", "recompute", "no tape"])
@pytest.mark.parametrize("op", ["gdn"], indirect=True)
def test_opcheck_of_gdn(op: Any, make: Any, form: str) -> None:
    made_by = op.module("_ops").MADE_BY
    case = make((70, 0, 30), (1, 2)) if form != "batch" else make((40,), (1, 2), batch=2)
    tensors = [getattr(case, name).requires_grad_(form != "no tape") for name in NAMES]
    state = case.initial_state.requires_grad_() if form == "recompute" else None
    cu = torch.tensor(case.boundaries, device=case.q.device) if form in ("packed", "recompute") else None
    host = list(case.boundaries) if form in ("packed on the host", "no tape") else None
    recompute = form == "recompute"
    options = (0.1, True, True, form != "no tape", "det", recompute, 2, False, made_by)
    args = (*tensors, state, cu, host, *options)
    torch.library.opcheck(torch.ops.cake.gdn.default, args)


@pytest.mark.parametrize("op", ["gdn"], indirect=True)
def test_opcheck_of_gdns_gate_and_beta(op: Any, make: Any, device: torch.device) -> None:
    op.module("_ops")  # registers them
    case = make((70,), (1, 2), batch=1)
    raw = case.g.requires_grad_()
    a_log, bias = (torch.rand(2, device=device).requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.cake.gdn_gate.default, (raw, a_log, bias))
    torch.library.opcheck(torch.ops.cake.gdn_gate.default, (raw, a_log, None))
    torch.library.opcheck(torch.ops.cake.gdn_beta.default, (case.beta.requires_grad_(), 2.0))


@pytest.mark.parametrize("form", ["packed", "gate", "recompute"])
@pytest.mark.parametrize("op", ["kda"], indirect=True)
def test_opcheck_of_kda(op: Any, make: Any, form: str) -> None:
    made_by = op.module("_ops").MADE_BY
    case = make((40, 0, 70), (1, 2))
    tensors = [getattr(case, name).requires_grad_() for name in NAMES]
    state = case.initial_state.requires_grad_() if form == "recompute" else None
    gated = form != "packed"
    parameters = [torch.rand(2), torch.rand(2, 128)] if gated else [None, None]
    parameters = [None if x is None else x.to(case.q.device).requires_grad_() for x in parameters]
    cu, host = torch.tensor(case.boundaries, device=case.q.device), None
    if form == "recompute":
        cu, host = None, list(case.boundaries)
    bound = -5.0 if form == "recompute" else None
    keep = form != "recompute"
    args = (
        *tensors,
        state,
        *parameters,
        cu,
        host,
        0.1,
        True,
        gated,
        bound,
        True,
        keep,
        "det",
        not keep,
        2,
        False,
        None,
        made_by,
    )
    torch.library.opcheck(torch.ops.cake.kda.default, args)


@pytest.mark.parametrize("op", ["kda"], indirect=True)
def test_opcheck_of_kdas_beta(op: Any, make: Any) -> None:
    op.module("_ops")  # registers it
    case = make((70,), (1, 2), batch=1)
    torch.library.opcheck(torch.ops.cake.kda_beta.default, (case.beta.requires_grad_(), 2.0))
