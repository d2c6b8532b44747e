"""Gradients of a projection's parts lie in the projection's own layout, and become its gradient uncopied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cake.core import gradients, split_projection
from cake.core.gradients import layout_of
from cake.core.testing import assert_bitwise_equal, permuted_view, pitched_view

COPIES = ("aten::copy_", "aten::clone", "aten::cat", "aten::contiguous", "aten::zero_", "aten::fill_")
PARTS = ((2, 128), (2, 128), (4, 128))


class Op(torch.autograd.Function):
    """The sum of its inputs times weights, with gradients where `layout_of` says."""

    @staticmethod
    def forward(ctx: Any, weights: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.layout, ctx.weights = layout_of(*inputs), weights
        return sum(((x * w).sum() for x, w in zip(inputs, weights, strict=True)), torch.zeros(()))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.layout is None:
            made = [torch.empty(w.shape, dtype=w.dtype) for w in ctx.weights]
        else:
            made = ctx.layout.empty(grad.device)
        for x, w in zip(made, ctx.weights, strict=True):
            torch.mul(grad, w, out=x)
        return None, *made


def projection(
    *lead: int, columns: int = 1024, order: tuple[int, ...] = (0, 1, 2)
) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf in an order of its axes, and what stands for a projection's output: it again, but no leaf."""
    leaf = permuted_view(torch.randn(*lead, columns).bfloat16(), order[: len(lead) + 1]).requires_grad_()
    return leaf, leaf.view_as(leaf)


def weights_of(*inputs: torch.Tensor) -> list[torch.Tensor]:
    return [torch.randn(x.shape).to(x.dtype) for x in inputs]


def copies_of(run: Any) -> list[str]:
    """What copies memory in the backward of `split_projection`, and in the one of the leaf."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    found = []

    def visit(event: Any) -> None:
        found.append(event.name)
        for child in event.cpu_children:
            visit(child)

    nodes = [x for x in seen.events() if x.name.startswith("autograd::engine::evaluate_function: ")]
    mine = [x for x in nodes if "_SplitBackward" in x.name or "AccumulateGrad" in x.name]
    assert len(mine) == 2
    for node in mine:
        visit(node)
    return [name for name in found if name in COPIES]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["batch first", "tokens first"])
@pytest.mark.parametrize("lead", [(1, 70), (3, 40), (2, 1)], ids=str)
def test_the_gradient_is_what_the_op_wrote(lead: tuple[int, int], order: tuple[int, ...]) -> None:
    leaf, x = projection(*lead, order=order)
    views = split_projection(x, *PARTS)
    for view, part in zip(views, torch.split(x, [256, 256, 512], -1), strict=True):
        assert view.data_ptr() == part.data_ptr()
        assert_bitwise_equal("a part", view.detach(), part.detach().unflatten(-1, view.shape[-2:]))
    weights, seen = weights_of(*views), []
    for view in views:
        view.register_hook(lambda grad: seen.append((grad.data_ptr(), grad.stride())))
    loss = Op.apply(weights, *views)
    assert copies_of(loss.backward) == []
    assert_bitwise_equal("the gradient", leaf.grad, torch.cat([w.flatten(2) for w in weights], -1))
    for size, mine, other in zip(leaf.shape, leaf.grad.stride(), leaf.stride(), strict=True):
        assert size == 1 or mine == other
    first = leaf.grad.data_ptr()
    assert [at - first for at, _ in seen] == [view.data_ptr() - x.data_ptr() for view in views]
    assert [strides for _, strides in seen] == [view.stride() for view in views]


def test_heads_that_take_turns() -> None:
    """Parts of each head in turn, as some projections have them."""
    leaf, x = projection(1, 30)
    qkv = split_projection(x, (2, 512))[0]
    q, k, v = qkv[..., :128], qkv[..., 128:256], qkv[..., 256:]
    assert layout_of(q, k, v) is None  # autograd's own slices: each makes a whole tensor of its gradient
    weights = weights_of(q, k, v)
    Op.apply(weights, q, k, v).backward()
    assert_bitwise_equal("the gradient", leaf.grad, torch.cat(weights, -1).flatten(2))


class Heads(torch.autograd.Function):
    """Somebody's own function, whose views take turns by heads; its backward returns what lies there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = x.unflatten(-1, (2, 512))
        return heads[..., :128], heads[..., 128:256], heads[..., 256:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        base = grads[0]._base
        assert base is not None
        assert all(grad._base is base for grad in grads)
        return base.view(*grads[0].shape[:2], 1024)


def test_a_function_of_ones_own() -> None:
    leaf, x = projection(2, 30)
    views = Heads.apply(x)
    weights = weights_of(*views)
    Op.apply(weights, *views).backward()
    assert_bitwise_equal("the gradient", leaf.grad, torch.cat(weights, -1).flatten(2))


class TestCopies:
    """What can't be taken as it lies gives the same gradient."""

    def test_parts_that_nobody_uses(self) -> None:
        leaf, x = projection(1, 20, columns=1536)
        q, _, v, _ = split_projection(x, (2, 128), 256, (4, 128), 512)
        weights = weights_of(q, v)
        loss = Op.apply(weights, q, v)
        loss.backward()
        zeros = torch.zeros(1, 20, 256).bfloat16()
        expected = [weights[0].flatten(2), zeros, weights[1].flatten(2), zeros, zeros]
        assert_bitwise_equal("the gradient", leaf.grad, torch.cat(expected, -1))

    def test_a_part_that_another_op_uses(self) -> None:
        """It alone is copied, into room that the buffer has."""
        leaf, x = projection(1, 20, columns=1536)
        z, q, k, v = split_projection(x, 512, *PARTS)
        weights = weights_of(q, k, v)
        seen = []
        q.register_hook(lambda grad: seen.append(grad.data_ptr()))
        (Op.apply(weights, q, k, v) + (3 * z).sum()).backward()
        threes = torch.full((1, 20, 512), 3.0).bfloat16()
        assert_bitwise_equal(
            "the gradient", leaf.grad, torch.cat([threes, *[w.flatten(2) for w in weights]], -1)
        )
        assert seen[0] - leaf.grad.data_ptr() == 1024

    def test_a_part_that_is_used_twice(self) -> None:
        leaf, x = projection(1, 20)
        q, k, v = split_projection(x, *PARTS)
        weights = weights_of(q, k, v)
        (Op.apply(weights, q, k, v) + (2 * q).sum()).backward()
        expected = [(weights[0] + 2).flatten(2), *[w.flatten(2) for w in weights[1:]]]
        assert_bitwise_equal("the gradient", leaf.grad, torch.cat(expected, -1))

    def test_one_part_as_two_inputs(self) -> None:
        leaf, x = projection(1, 20)
        q, _, v = split_projection(x, *PARTS)
        assert layout_of(q, q, v) is None
        weights = weights_of(q, q, v)
        Op.apply(weights, q, q, v).backward()
        zeros = torch.zeros(1, 20, 256).bfloat16()
        expected = [(weights[0] + weights[1]).flatten(2), zeros, weights[2].flatten(2)]
        assert_bitwise_equal("the gradient", leaf.grad, torch.cat(expected, -1))

    def test_two_projections(self) -> None:
        leaves, parts = zip(*(projection(1, 20) for _ in range(2)), strict=True)
        (q, k, _), (_, _, v) = (split_projection(x, *PARTS) for x in parts)
        weights = weights_of(q, k, v)
        Op.apply(weights, q, k, v).backward()
        for leaf, given in ((leaves[0], [*weights[:2], None]), (leaves[1], [None, None, weights[2]])):
            expected = [
                torch.zeros(1, 20, n).bfloat16() if w is None else w.flatten(2)
                for w, n in zip(given, (256, 256, 512), strict=True)
            ]
            assert_bitwise_equal("a gradient", leaf.grad, torch.cat(expected, -1))

    def test_gradients_beside_what_others_hold(self) -> None:
        """Between parts of somebody else's tensor nothing is written."""
        leaf, x = projection(1, 20, columns=768)
        a, _, c = split_projection(x, 256, 256, 256)
        theirs = torch.randn(1, 20, 768).bfloat16()
        before = theirs.clone()
        torch.autograd.backward([a, c], [theirs[..., :256], theirs[..., 512:]])
        assert_bitwise_equal("theirs", theirs, before)
        expected = torch.cat([before[..., :256], torch.zeros_like(before[..., :256]), before[..., 512:]], -1)
        assert_bitwise_equal("the gradient", leaf.grad, expected)

    def test_a_graph_that_is_kept(self) -> None:
        leaf, x = projection(1, 20)
        views = split_projection(x, *PARTS)
        loss = Op.apply(weights_of(*views), *views)
        loss.backward(retain_graph=True)
        once = leaf.grad.clone()
        loss.backward()
        assert_bitwise_equal("twice", leaf.grad, 2 * once)

    def test_gradients_of_gradients(self) -> None:
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

        def f(x: torch.Tensor) -> torch.Tensor:
            a, b = split_projection(x, (2, 2), 4)
            return a.flatten(1) * b * b

        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)


class TestLayouts:
    def test_contiguous_inputs_have_none(self) -> None:
        assert layout_of(torch.zeros(2, 3, 4), torch.zeros(2, 3)) is None

    def test_a_view_of_a_leaf_has_none(self) -> None:
        """AccumulateGrad would copy anything else."""
        x = pitched_view(torch.zeros(1, 5, 2, 128), 256).requires_grad_()
        assert layout_of(x) is None

    def test_parts_of_autograds_own_split_have_none(self) -> None:
        x = torch.zeros(1, 5, 512, requires_grad=True)
        assert layout_of(*[part.unflatten(-1, (2, 128)) for part in x.split(256, -1)]) is None

    @pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)], ids=str)
    def test_a_tensor_in_another_order_of_axes_keeps_it(self, order: tuple[int, ...]) -> None:
        x = permuted_view(torch.zeros(2, 3, 4, 8), order)
        layout = layout_of(x, torch.zeros(2, 3))
        assert layout is not None
        made, plain = layout.empty(x.device)
        assert made.stride() == x.stride()
        assert plain.is_contiguous()
        assert plain.shape == (2, 3)

    @pytest.mark.parametrize(
        "view",
        [
            torch.zeros(1, 5, 1, 128).expand(-1, -1, 2, -1),
            torch.zeros(1, 1, 2, 128).expand(-1, 5, -1, -1),
            torch.zeros(1, 9, 128).as_strided((1, 5, 2, 128), (640, 128, 64, 1)),
        ],
        ids=["one head", "one token", "overlapping"],
    )
    def test_memory_that_is_shared_has_none(self, view: torch.Tensor) -> None:
        class Views(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                at = view.storage_offset()
                return x.as_strided(view.shape, view.stride(), at), x.as_strided((1, 5, 2), (10, 2, 1), at)

            @staticmethod
            def backward(ctx: Any, *grads: torch.Tensor) -> None:
                return None

        leaf = torch.zeros(4096, requires_grad=True)
        assert layout_of(Views.apply(leaf)[0]) is None

    def test_mostly_room_has_none(self) -> None:
        _, x = projection(1, 5, columns=768)
        q, _ = split_projection(x, (2, 128), 512)
        assert layout_of(q) is None
        _, x = projection(1, 5, columns=512)
        q, _ = split_projection(x, (2, 128), 256)
        layout = layout_of(q)
        assert layout is not None
        assert layout.empty(q.device)[0].stride() == q.stride()

    def test_a_buffer_takes_no_more_than_its_parts(self) -> None:
        _, x = projection(2, 33)
        views = split_projection(x, *PARTS)
        layout = layout_of(*views)
        assert layout is not None
        assert [elements for elements, *_ in layout.buffers] == [2 * 33 * 1024]
        made = layout.empty(x.device)
        assert {view.untyped_storage().nbytes() for view in made} == {2 * 2 * 33 * 1024}

    def test_scalars_of_the_same_projection(self) -> None:
        """Beta and the gate beside q, k, v: each type of gradient that was one tensor's is one's again."""
        _, x = projection(1, 5, columns=1032)
        q, k, v, beta, g = split_projection(x, *PARTS, 4, 4)
        layout = layout_of(q, k, v, g, beta)
        assert layout is not None
        assert len(layout.buffers) == 1
        made = layout.empty(x.device)
        assert [y.stride() for y in made] == [y.stride() for y in (q, k, v, g, beta)]
        first = made[0].data_ptr()
        at = [y.data_ptr() - x.data_ptr() for y in (q, k, v, g, beta)]
        assert [y.data_ptr() - first for y in made] == at

    def test_where_a_row_begins(self) -> None:
        """Parts that begin late in a row leave room before them; rows stay aligned to 16 bytes either way."""
        _, x = projection(1, 5, columns=512)
        _, k = split_projection(x, 256, (2, 128))
        layout = layout_of(k)
        assert layout is not None
        assert layout.empty(x.device)[0].storage_offset() == 256
        _, whole = projection(1, 5, columns=1024)
        part = split_projection(whole, 8, 1016)[1][..., :520]
        assert layout_of(part.unflatten(-1, (1, 520))) is None

    def test_layouts_are_found_again(self) -> None:
        gradients._layout.cache_clear()
        for _ in range(3):
            _, x = projection(1, 7)
            layout_of(*split_projection(x, *PARTS))
        assert gradients._layout.cache_info().misses == 1


def test_without_a_gradient_they_are_plain_views() -> None:
    x = torch.randn(3, 8)
    a, b = split_projection(x, (2, 2), 4)
    assert a.grad_fn is None
    a.zero_()
    assert x[:, :4].abs().sum() == 0
    assert b.data_ptr() == x[:, 4:].data_ptr()
    y = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert split_projection(y, 4, 4)[0].grad_fn is None


def test_compiled_it_is_a_split() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        a, b = split_projection(x, (2, 2), 4)
        return (a.flatten(1) * b).sum()

    f(leaf).backward()
    (expected,) = torch.autograd.grad((leaf[:, :4] * leaf[:, 4:]).sum(), leaf)
    assert_bitwise_equal("the gradient", leaf.grad, expected)


def test_what_it_refuses() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"must add up to the last axis of x, got \[\(4,\), \(2,\)\]"):
        split_projection(x, 4, 2)
    with pytest.raises(ValueError, match="must add up"):
        split_projection(torch.zeros(()), 1)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        split_projection([1, 2], 1, 1)  # type: ignore[arg-type]
    view, _ = split_projection(x, 4, 4)
    with pytest.raises(RuntimeError, match="view"):
        view.add_(1)
