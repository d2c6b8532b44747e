"""Whole calls, run by the emulator: what is recorded and played gives the bits of the stages one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cake.core import config, loader, played, sequences, split_projection, workspace
from cake.core.calls import Memo
from cake.core.launch import is_aligned
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error

BOUNDS = (0, 70, 70, 71, 199)


class Op:
    """A call of an op, its kernels run by the emulator."""

    def __init__(self, name: str, monkeypatch: Any, emulate: Any) -> None:
        self.api = __import__(f"cake.{name}.api", fromlist=["api"])
        self.autograd = __import__(f"cake.{name}._autograd", fromlist=["_autograd"])
        stages = __import__(f"cake.{name}._stages", fromlist=["_stages"])
        emulate(__import__(f"cake.{name}._cuda", fromlist=["_cuda"]))
        monkeypatch.setattr(stages, "backend_name", lambda *asked: "cuda")
        monkeypatch.setattr(self.api, "_calls", Memo())
        self.call = self.api.chunk_gated_delta_rule if name == "gdn" else self.api.chunk_kda
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        gate = (1, 199, 2) if name == "gdn" else (1, 199, 2, 128)
        self.inputs = {
            "q": normal(1, 199, 1, 128).bfloat16(),
            "k": normal(1, 199, 1, 128).bfloat16(),
            "v": normal(1, 199, 2, 128).bfloat16(),
            "g": -torch.nn.functional.softplus(normal(*gate)),
            "beta": normal(1, 199, 2).sigmoid(),
            "initial_state": 0.1 * normal(4, 2, 128, 128),
        }
        self.do, self.dht = normal(1, 199, 2, 128).bfloat16(), normal(4, 2, 128, 128)

    def results(self, *, final: bool = True, wanted: Any = None, **arguments: Any) -> dict[str, torch.Tensor]:
        """o, the final state and the gradients of one call."""
        given = {name: x.clone() for name, x in self.inputs.items()}
        leaves = {name: x.requires_grad_() for name, x in given.items() if wanted is None or name in wanted}
        arguments = {"cu_seqlens_cpu": BOUNDS, "use_qk_l2norm_in_kernel": True, **arguments}
        o, ht = self.call(**given, output_final_state=final, **arguments)
        # A gradient may come with any strides.
        dht = self.dht.mT.contiguous().mT
        outputs = ([o, ht], [self.do, dht]) if final else ([o], [self.do])
        grads = torch.autograd.grad(outputs[0], list(leaves.values()), outputs[1])
        return {"o": o, **({"ht": ht} if final else {}), **dict(zip(leaves, grads, strict=True))}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert_bitwise_equal(name, got[name], x)


@pytest.fixture(params=["gdn", "kda"])
def op(request: Any, monkeypatch: Any, emulate: Any) -> Op:
    return Op(request.param, monkeypatch, emulate)


@pytest.fixture
def one_by_one(op: Op, monkeypatch: Any) -> Any:
    """Results of the stages, run as they are."""

    def results(**arguments: Any) -> dict[str, torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(op.autograd.Call, "played", property(lambda call: False))
            return op.results(**arguments)

    return results


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_played_and_one_by_one(op: Op, one_by_one: Any, recompute: bool, segments: int) -> None:
    arguments = {"recompute_state": recompute, "segments": segments}
    expected = one_by_one(**arguments)
    with poisoned_empty():
        for _ in range(2):  # recorded, and played again
            assert_same(op.results(**arguments), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"final": False},
        {"final": False, "wanted": ("q", "beta")},
        {"wanted": ("initial_state",)},
        {"state_v_first": True},
    ],
    ids=["no final state", "two gradients", "the state's alone", "states transposed"],
)
def test_parts(op: Op, one_by_one: Any, arguments: dict[str, Any]) -> None:
    expected = one_by_one(**arguments)
    with poisoned_empty():
        assert_same(op.results(**arguments), expected)
        assert_same(op.results(**arguments), expected)


def test_gradients_that_kernels_cannot_load_are_copied(op: Op, one_by_one: Any, monkeypatch: Any) -> None:
    """Contiguous ones at an odd address too, which only the recording sees."""
    expected = one_by_one()
    # As on a GPU: twins load from any address.
    monkeypatch.setattr(played, "loadable", lambda x: x if is_aligned(x) else x.clone())
    odd = torch.empty(op.do.numel() + 1, dtype=op.do.dtype)[1:].view_as(op.do)
    spread = torch.empty(*op.do.shape, 2, dtype=op.do.dtype)[..., 0]
    for do in (odd, spread):
        op.do = do.copy_(op.do)
        for _ in range(2):
            assert_same(op.results(), expected)


@pytest.mark.parametrize("op", ["kda"], indirect=True)
@pytest.mark.parametrize("keep", [{}, {"disable_recompute": True}, {"recompute_state": True}], ids=str)
def test_a_gate_and_every_tape(op: Op, one_by_one: Any, keep: dict[str, bool]) -> None:
    # Parameters may be strided views.
    op.inputs["A_log"] = torch.tensor([[0.5, 7.0], [-0.5, 7.0]])[:, 0]
    op.inputs["dt_bias"] = torch.linspace(-1, 1, 256).view(128, 2).mT
    arguments = {"use_gate_in_kernel": True, "segments": 2, **keep}
    expected = one_by_one(**arguments)
    with poisoned_empty():
        assert_same(op.results(**arguments), expected)
        assert_same(op.results(**arguments), expected)


@pytest.mark.parametrize("keep", [{}, {"recompute_state": True}, {"allow_neg_eigval": True}], ids=str)
def test_betas_that_come_as_logits(op: Op, one_by_one: Any, keep: dict[str, Any]) -> None:
    """Their sigmoid and its gradient are a part of the recording, the latter in the logits' dtype."""
    logits = torch.linspace(-9, 9, 398).view(199, 2)[torch.randperm(199)].bfloat16()
    op.inputs["beta"] = torch.stack([logits, logits], -1)[None, ..., 0]
    arguments = {"use_beta_sigmoid_in_kernel": True, **keep}
    expected = one_by_one(**arguments)
    with poisoned_empty():
        for _ in range(2):
            got = op.results(**arguments)
            assert {name: x.dtype for name, x in got.items()} == {
                name: x.dtype for name, x in expected.items()
            }
            # The C library's exp isn't torch's to the last bit.
            assert max(relative_error(got[name], x) for name, x in expected.items()) < 1e-3
    assert_same(op.results(wanted=("q",), **arguments), {name: got[name] for name in ("o", "ht", "q")})


@pytest.mark.parametrize("op", ["kda"], indirect=True)
def test_parameters_keep_their_shape(op: Op, one_by_one: Any) -> None:
    op.inputs["A_log"], bias = torch.tensor([0.5, -0.5]), torch.linspace(-1, 1, 256)
    for given in (bias, bias.view(2, 128), torch.stack([bias, bias], -1)[:, 0], bias.bfloat16()):
        op.inputs["dt_bias"] = given
        expected = one_by_one(use_gate_in_kernel=True)
        got = op.results(use_gate_in_kernel=True)
        assert got["dt_bias"].shape == given.shape
        assert_same(got, expected)


@pytest.fixture
def unseen(op: Op, monkeypatch: Any) -> Any:
    """`unseen(arguments)`: lets calls find boundaries on the device, in any tensor and read by nobody."""

    def start() -> None:
        monkeypatch.setattr(op.api, "_calls", Memo())
        monkeypatch.setattr(
            op.api.sequences,
            "of_call",
            lambda batch, tokens, device, cu, cpu: sequences.packed_on_device(cu, tokens),
        )
        monkeypatch.setattr(op.api, "key_of", lambda tensors, cu, cpu, settings: settings)
        monkeypatch.setattr(op.api, "near_key_of", lambda tensors, cu, cpu, settings: ("near", settings))

    return start


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_boundaries_on_the_device(op: Op, unseen: Any, recompute: bool) -> None:
    expected = op.results(recompute_state=recompute)
    unseen()
    for _ in range(2):
        cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
        with poisoned_empty():
            got = op.results(cu_seqlens=cu_seqlens, cu_seqlens_cpu=None, recompute_state=recompute)
        assert_same(got, expected)
    # The same call, other boundaries: the tables are made again.
    cu_seqlens = torch.tensor((0, 70, 70, 101, 199), dtype=torch.int32)
    other = op.results(cu_seqlens=cu_seqlens, cu_seqlens_cpu=None, recompute_state=recompute)
    assert not torch.equal(other["o"], expected["o"])
    assert len(set(op.api._calls._made.values())) == 1


def test_segments_that_are_cut_on_the_device(op: Op, unseen: Any, monkeypatch: Any) -> None:
    expected = op.results(segments=2)  # of one chunk each
    unseen()
    monkeypatch.setattr("cake.core.segments.plan_unseen", lambda *asked: 1)
    monkeypatch.setattr("cake.core.segments.CHOSEN_SEQUENCES", 0)
    for _ in range(2):
        cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int64)
        with poisoned_empty():
            got = op.results(cu_seqlens=cu_seqlens, cu_seqlens_cpu=None)
        assert_same(got, expected)


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_the_gradient_of_a_projection(op: Op, recompute: bool) -> None:
    """Written where its parts' gradients lie in it, all in the dtype of their inputs."""
    op.inputs["g"], op.inputs["beta"] = op.inputs["g"].bfloat16(), op.inputs["beta"].bfloat16()
    names = ("q", "k", "v", "g", "beta")
    parts = [op.inputs[name] for name in names]
    arguments = {"cu_seqlens_cpu": BOUNDS, "use_qk_l2norm_in_kernel": True, "recompute_state": recompute}
    seen: list[int] = []
    with poisoned_empty():
        apart = op.results(final=False, **arguments)
        expected = torch.cat([apart[name].flatten(2) for name in names], -1)
        columns = torch.cat([x.flatten(2) for x in parts], -1)
        room = -columns.shape[-1] % 8  # rows are aligned to 16 bytes
        for _ in range(2):
            leaf = torch.nn.functional.pad(columns, (0, room)).requires_grad_()
            *views, _ = split_projection(leaf.view_as(leaf), *[x.shape[2:] for x in parts], room)
            seen.clear()
            for view in views:
                view.register_hook(lambda grad: seen.append(grad.data_ptr()))
            given = {**op.inputs, **dict(zip(names, views, strict=True))}
            op.call(**given, **arguments)[0].backward(op.do)
            assert_bitwise_equal("the gradient", leaf.grad[..., : columns.shape[-1]], expected)
            assert leaf.grad[..., columns.shape[-1] :].count_nonzero() == 0
            assert sorted(at - leaf.grad.data_ptr() for at in seen) == sorted(
                view.data_ptr() - leaf.data_ptr() for view in views
            )


def test_without_a_gradient(op: Op, one_by_one: Any) -> None:
    expected = one_by_one()["o"]
    with torch.no_grad(), poisoned_empty():
        for _ in range(2):
            o, _ = op.call(**op.inputs, cu_seqlens_cpu=BOUNDS, use_qk_l2norm_in_kernel=True)
            assert_bitwise_equal("o", o, expected)


def test_scratch_comes_from_the_workspace(op: Op, one_by_one: Any) -> None:
    expected = one_by_one()
    with config.temporary(cake_workspace_pool_bytes=1 << 30):
        hits = workspace.stats().hits
        for _ in range(2):
            with poisoned_empty():
                assert_same(op.results(), expected)
        assert workspace.stats().hits > hits
        assert workspace.release() > 0


def test_a_library_that_is_loaded_again_records_again(op: Op) -> None:
    op.results()
    call, *_ = op.api._calls._made.values()
    before = dict(call.recordings)
    op.results()
    assert call.recordings == before
    loader.release()
    op.results()
    assert len(before) == len(call.recordings) == 2
    assert all(call.recordings[key] is not found for key, found in before.items())


def test_calls_that_look_alike_are_told_apart(op: Op) -> None:
    """By their recordings: dtypes, strides, and what is refused."""
    op.results()
    floats = {name: op.inputs[name].bfloat16() for name in ("g", "beta")}
    op.inputs |= floats
    narrow = op.results()
    assert narrow["beta"].dtype is torch.bfloat16
    op.inputs |= {name: x.float() for name, x in floats.items()}
    wide = op.results()
    assert wide["beta"].dtype is torch.float32
    assert_same(op.results(), wide)
    for name in ("q", "v"):
        x = op.inputs[name]
        op.inputs[name] = torch.cat([x, x], -1)[..., :128]
        assert_same({**op.results(), name: wide[name]}, wide)
        op.inputs[name] = torch.stack([x, x], -1)[..., 0]
        with pytest.raises(ValueError, match="last axis"), torch.no_grad():
            op.call(**op.inputs, cu_seqlens_cpu=BOUNDS, use_qk_l2norm_in_kernel=True)
        op.inputs[name] = x.half()
        with pytest.raises(TypeError, match=f"{name} must be bfloat16"):
            op.results()
        op.inputs[name] = x
    op.inputs["q"] = None
    with pytest.raises(TypeError, match="q must be"), torch.no_grad():
        op.call(**op.inputs, cu_seqlens_cpu=BOUNDS, use_qk_l2norm_in_kernel=True)


class Wrapper(torch.Tensor):
    """Has the metadata of a tensor and no memory."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, x.stride(), dtype=x.dtype, device=x.device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of a wrapper")


@pytest.mark.parametrize("name", ["q", "g", "beta", "initial_state"])
def test_a_tensor_without_memory_is_refused(op: Op, name: str) -> None:
    expected = op.call(**op.inputs, cu_seqlens_cpu=BOUNDS)[0]
    with pytest.raises((RuntimeError, TypeError), match=r"without memory|data pointer"):
        op.call(**{**op.inputs, name: Wrapper(op.inputs[name])}, cu_seqlens_cpu=BOUNDS)
    assert_bitwise_equal("o", op.call(**op.inputs, cu_seqlens_cpu=BOUNDS)[0], expected)


def test_more_layouts_than_are_kept(op: Op) -> None:
    """Launches are kept for each layout of the tensors; gradients come in any."""
    expected = op.results()
    do = op.do
    for room in (*range(0, 80, 8), 0, 8):
        op.do = torch.nn.functional.pad(do, (0, room))[..., :128]
        with poisoned_empty():
            assert_same(op.results(), expected)


def test_a_tape_that_came_back_otherwise_is_refused_before_a_launch(op: Op) -> None:
    def forward(spoil: Any) -> torch.Tensor:
        inputs = {name: x.clone().requires_grad_() for name, x in op.inputs.items()}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, spoil):
            return op.call(**inputs, cu_seqlens_cpu=BOUNDS)[0]

    forward(lambda x: x).backward(op.do)
    for spoil in (lambda x: x[:-1] if x.dtype is torch.uint8 else x, lambda x: x.double()):
        with pytest.raises(RuntimeError, match=r"the backward's saved \w+ must be"):
            forward(spoil).backward(op.do)
