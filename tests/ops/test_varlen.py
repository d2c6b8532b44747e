"""Packed sequences: empty ones, many short ones, boundaries in every form, refilled and thrown away."""

from __future__ import annotations

import random

import pytest
import torch

from cake.core.testing import assert_bitwise_equal

TOKENS = ("q", "k", "v", "g", "beta")


def sliced(case, start, end, sequences=slice(None)):
    """The part of a pack from one token to another."""
    cut = {name: getattr(case, name)[:, start:end] for name in (*TOKENS, "do")}
    return case.replace(
        **cut,
        initial_state=case.initial_state[sequences],
        dht=case.dht[sequences],
        boundaries=(0, end - start),
    )


class TestEmptySequences:
    BOUNDS = (0, 0, 5, 5, 64, 64, 200, 200)

    def lengths(self):
        return [b - a for a, b in zip(self.BOUNDS, self.BOUNDS[1:], strict=False)]

    def test_they_change_nothing_else(self, make, call):
        case = make(self.lengths(), heads=(1, 2))
        full = [i for i, length in enumerate(self.lengths()) if length]
        dense = case.replace(
            boundaries=(0, 5, 64, 200), initial_state=case.initial_state[full], dht=case.dht[full]
        )
        got, expected = call(case), call(dense)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert_bitwise_equal(name, got[name], expected[name])
        for name in ("ht", "dh0"):
            assert_bitwise_equal(name, got[name][full], expected[name])

    def test_their_state_passes_through(self, make, call):
        case = make(self.lengths())
        got = call(case)
        empty = [i for i, length in enumerate(self.lengths()) if not length]
        assert_bitwise_equal("ht", got["ht"][empty], case.initial_state[empty])
        assert_bitwise_equal("dh0", got["dh0"][empty], case.dht[empty])

    def test_without_states(self, make, call, assert_accurate):
        case = make(self.lengths(), state=False)
        got = call(case, final=True)
        assert not got["ht"][[0, 2, 4, 6]].any()
        assert_accurate(case, got)

    def test_accuracy(self, make, call, assert_accurate):
        case = make(self.lengths())
        assert_accurate(case, call(case))


@pytest.mark.slow
class TestManyShortSequences:
    def test_accuracy(self, make, call, assert_accurate):
        case = make([1 + i % 3 for i in range(300)], heads=(1, 1))
        # The worst of 300 sequences of a token or two.
        assert_accurate(case, call(case), 1.5)

    def test_beyond_a_grid_limit(self, make, call, device):
        # Compared with the calls on a few of them alone: sequences are independent, to the bit.
        n = 2048 if device.type == "cpu" else 70000
        lengths = [1 + i % 3 for i in range(n)]
        case = make(lengths, heads=(1, 1), state=False)
        got = call(case)
        starts = case.boundaries
        for i in (0, 1, n // 2, n - 2, n - 1):
            part = case.replace(
                **{name: getattr(case, name)[:, starts[i] : starts[i + 1]] for name in (*TOKENS, "do")},
                boundaries=(0, lengths[i]),
            )
            alone = call(part)
            for name, x in alone.items():
                assert_bitwise_equal(name, got[name][:, starts[i] : starts[i + 1]], x)


@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_does_not_see_its_neighbours(make, call, seed):
    lengths = random.Random(seed).choices([1, 7, 63, 64, 65, 130, 200], k=5)
    case = make(lengths, heads=(1, 2), seed=seed)
    pack = call(case)
    for i, (start, end) in enumerate(zip(case.boundaries, case.boundaries[1:], strict=False)):
        alone = call(sliced(case, start, end, slice(i, i + 1)))
        for name, x in alone.items():
            part = pack[name][i : i + 1] if name in ("ht", "dh0") else pack[name][:, start:end]
            assert_bitwise_equal(f"{name} of sequence {i}", part, x)


def test_not_even_through_nan(make, call):
    case = make((70, 64, 30))
    clean = call(case)
    v = case.v.clone()
    v[:, 70:134] = float("nan")
    dirty = call(case.replace(v=v))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        for part in (slice(0, 70), slice(134, 164)):
            assert_bitwise_equal(name, dirty[name][:, part], clean[name][:, part])


def test_rows_of_a_batch_are_a_pack(make, call):
    case = make((100,), heads=(1, 2), batch=3)
    rows = call(case)
    flat = {name: getattr(case, name).flatten(0, 1)[None] for name in (*TOKENS, "do")}
    pack = call(case.replace(**flat, boundaries=(0, 100, 200, 300)))
    for name, x in rows.items():
        assert_bitwise_equal(name, pack[name].view(x.shape), x)


class TestForms:
    """Every spelling of the boundaries gives the same bits."""

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_cu_seqlens(self, make, call, assert_same_bits, device, dtype):
        case = make((70, 0, 65, 1))
        cu = torch.tensor(case.boundaries, dtype=dtype, device=device)
        assert_same_bits(call(case, cu_seqlens=cu), call(case))

    @pytest.mark.parametrize(
        "spell",
        [
            list,
            tuple,
            torch.tensor,
            lambda x: torch.tensor(x, dtype=torch.int32),
            lambda x: torch.tensor(x).repeat_interleave(2)[::2],
        ],
        ids=["list", "tuple", "int64", "int32", "strided"],
    )
    def test_cu_seqlens_cpu(self, make, call, assert_same_bits, spell):
        case = make((70, 0, 65, 1))
        assert_same_bits(call(case, cu_seqlens_cpu=spell(case.boundaries)), call(case))

    def test_a_cpu_tensor_as_cu_seqlens(self, make, call, assert_same_bits):
        case = make((70, 0, 65, 1))
        assert_same_bits(call(case, cu_seqlens=torch.tensor(case.boundaries)), call(case))

    def test_the_host_form_wins(self, make, call, assert_same_bits, device):
        case = make((70, 65))
        other = torch.tensor([0, 1, 135], device=device)
        got = call(case, cu_seqlens=other, cu_seqlens_cpu=case.boundaries)
        assert_same_bits(got, call(case))

    def test_one_sequence_is_no_boundaries(self, make, call, assert_same_bits):
        case = make((135,))
        assert_same_bits(call(case.replace(boundaries=None)), call(case))


class TestReuse:
    """Nothing is remembered about a boundary tensor but its values at the time of the call."""

    def test_fresh_tensors_at_recycled_addresses(self, make, call, device):
        rng = random.Random(0)
        case = make((130,), heads=(1, 1), state=False)
        known = {}
        for _ in range(60):
            cuts = sorted(rng.choices([0, 1, 30, 64, 65, 100, 130], k=3))
            bounds = (0, *cuts, 130)
            cu = torch.tensor(bounds, device=device)
            got = call(case.replace(boundaries=bounds), cu_seqlens=cu)["o"]
            del cu
            expected = known.setdefault(bounds, call(case.replace(boundaries=bounds))["o"])
            assert_bitwise_equal(f"o of {bounds}", got, expected)

    def test_one_tensor_refilled_between_calls(self, make, call, device, assert_same_bits):
        case = make((130,), heads=(1, 2), state=False)
        cu = torch.zeros(4, dtype=torch.int64, device=device)
        for bounds in ((0, 64, 65, 130), (0, 1, 2, 130), (0, 0, 130, 130), (0, 64, 65, 130)):
            cu.copy_(torch.tensor(bounds))
            packed = case.replace(boundaries=bounds)
            assert_same_bits(call(packed, cu_seqlens=cu), call(packed))

    def test_one_tensor_refilled_before_the_backward(self, op, make, device):
        # On a GPU the values aren't read back, so the backward refuses. A CPU tensor was read in the call.
        case = make((130,), state=False)
        v = case.v.requires_grad_()
        cu = torch.tensor([0, 64, 130], device=device)
        o, _ = op.chunk(case.q, case.k, v, case.g, case.beta, cu_seqlens=cu)
        expected, _ = op.chunk(case.q, case.k, v, case.g, case.beta, cu_seqlens_cpu=(0, 64, 130))
        cu[1] = 100
        if device.type == "cuda":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                o.backward(case.do)
            return
        got = torch.autograd.grad(o, v, case.do)[0]
        assert_bitwise_equal("dv", got, torch.autograd.grad(expected, v, case.do)[0])


class TestCallsThatLookAlike:
    """A call finds what was decided for its shapes before; its boundaries and values are its own."""

    def test_other_boundaries(self, make, call):
        case = make([40, 100, 60], heads=(1, 2))
        first = call(case)
        moved = call(case.replace(boundaries=(0, 90, 120, 200)))
        assert not torch.equal(first["o"], moved["o"])
        for name, x in call(case).items():
            assert_bitwise_equal(name, x, first[name])

    def test_a_gradient_asked_for_later(self, op, make, call):
        case = make([70, 30], heads=(1, 2))
        inputs = [getattr(case, name) for name in TOKENS]
        with torch.no_grad():
            quiet, _ = op.chunk(*inputs, cu_seqlens_cpu=case.boundaries)
        inputs = [x.requires_grad_() for x in inputs]
        o, _ = op.chunk(*inputs, cu_seqlens_cpu=case.boundaries)
        assert_bitwise_equal("o", o.detach(), quiet)
        assert all(x is not None for x in torch.autograd.grad(o, inputs, case.do))

    def test_a_refusal_stays_one(self, op, make):
        case = make([70, 30], heads=(1, 2))
        inputs = [getattr(case, name) for name in TOKENS]
        for _ in range(2):
            with pytest.raises(ValueError, match="must end at T=100"):
                op.chunk(*inputs, cu_seqlens_cpu=[0, 70, 90])
            op.chunk(*inputs, cu_seqlens_cpu=case.boundaries)
