"""The merge of affine maps, and the choice of how a kernel runs it."""

from __future__ import annotations

import itertools

import pytest
import torch

from cake.core import state_chain
from cake.core.testing import poisoned_empty, relative_error

CHAINS = (((0, -1, 1), (1, 1, 2), (2, 2, -1), (3, 3, 3)), ((5, 4, 0),), ((4, 0, 4), (0, 4, 5)))


@pytest.fixture(params=[128, 256], ids="C{}".format)
def maps(request):
    random = torch.Generator().manual_seed(1)
    b = torch.randn(6, 3, 128, request.param, generator=random)
    m = torch.randn(5, 3, 128, 128, generator=random) / 12
    return b, m


def exact(b, m, chains, n_out, transposed=False, live=None):
    b, m = b.double(), m.double()
    out = torch.zeros(n_out, *b.shape[1:], dtype=torch.float64)
    for steps in chains:
        state = torch.zeros_like(b[0])
        for b_tile, m_tile, row in steps:
            product = torch.zeros_like(state)
            for head in range(b.shape[1]):
                if m_tile >= 0 and (live is None or live[m_tile, head]):
                    x = m[m_tile, head]
                    product[head] = (x.T if transposed else x) @ state[head]
            state = product + b[b_tile]
            if row >= 0:
                out[row] = state
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("flags", [False, True], ids=["all", "live"])
def test_merge(maps, transposed, flags):
    b, m = maps
    live = None
    if flags:
        live = torch.randint(0, 2, (5, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
        m = torch.where(live[..., None, None] != 0, m, torch.nan)  # never looked at
    with poisoned_empty():
        got = state_chain.merge(b, m, CHAINS, 6, live=live, transposed=transposed)
    expected = exact(b, torch.nan_to_num(m), CHAINS, 6, transposed, live)
    assert relative_error(got, expected) < 1e-6


def test_into_a_tensor(maps):
    b, m = maps
    out = torch.full((7, *b.shape[1:]), 3.0)
    assert state_chain.merge(b, m, CHAINS[1:2], 7, out=out) is out
    assert (out[1:] == 3).all()
    torch.testing.assert_close(out[0], b[5])


class TestTables:
    def test_layout(self):
        ((table, count),) = state_chain.tables(CHAINS)
        assert count == 3
        assert table[:4].tolist() == [0, 4, 5, 7]
        assert table[4:].tolist() == [x for steps in CHAINS for step in steps for x in step]

    def test_many_chains_take_several_launches(self):
        chains = tuple(tuple((c, -1, c) for _ in range(1 + c % 7)) for c in range(400))
        made = state_chain.tables(chains)
        assert len(made) > 1
        lengths = []
        for table, count in made:
            assert count <= state_chain.MOST_CHAINS
            ends = table[: count + 1].tolist()
            assert ends[-1] <= state_chain.MOST_STEPS
            lengths += [b - a for a, b in itertools.pairwise(ends)]
            assert len(table) == count + 1 + 3 * ends[-1]
        assert lengths == [len(steps) for steps in chains]

    def test_a_chain_that_fits_no_launch(self):
        with pytest.raises(ValueError, match="a chain must have at most 640 steps, got 641"):
            state_chain.tables((((0, -1, -1),) * 641,))


class TestChoice:
    def test_bands(self):
        widths = [state_chain.columns_per_block(n, 128, "sm_90a") for n in range(1, 200)]
        # One wave of narrow blocks first; later a narrower block may take fewer waves for its work again.
        assert widths[:66] == sorted(widths[:66])
        assert set(widths) == set(state_chain.COLUMNS)
        assert state_chain.columns_per_block(5, 256, "sm_90a") == state_chain.columns_per_block(
            10, 128, "sm_90a"
        )

    @pytest.mark.parametrize("bands", state_chain.BANDS.values())
    def test_tables_cover_everything(self, bands):
        bounds = [most for most, _ in bands]
        assert bounds[-1] is None
        assert bounds[:-1] == sorted(bounds[:-1])
        assert all(width in state_chain.COLUMNS for _, width in bands)

    def test_a_given_width(self):
        for width in state_chain.COLUMNS:
            assert state_chain.columns_per_block(7, 256, "sm_90a", width) == width

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0, 128, "sm_90a"), "n_chains must be at least 1, got 0"),
            ((1, 64, "sm_90a"), r"ncols must be one of \(128, 256\), got 64"),
            ((1, 128, "sm_80"), "merges are planned for sm_90a, got architecture 'sm_80'"),
            ((1, 128, "sm_90a", 12), r"columns must be one of \(8, 16, 32, 64\), got 12"),
        ],
    )
    def test_refusals(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            state_chain.columns_per_block(*arguments)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"b": torch.zeros(2, 3, 128, 64)}, r"b must be \[tiles, HV, 128, 128 or 256\]"),
            ({"m": torch.zeros(2, 4, 128, 128)}, "m must be"),
            ({"live": torch.zeros(1, 3, dtype=torch.int32)}, "live must be"),
            ({"columns": 7}, "columns must be one of"),
            ({"chains": ()}, "chains must hold a chain"),
            ({"chains": ((),)}, "chains must hold a chain"),
            ({"chains": (((2, 0, 0),),)}, "steps must name tiles of b from 0 to 1, got 2 to 2"),
            ({"chains": (((0, 2, 0),),)}, "steps must name tiles of m from -1 to 1"),
            ({"chains": (((0, 0, 1),),)}, "steps must name tiles of out from -1 to 0"),
        ],
    )
    def test_values(self, change, message):
        arguments = {
            "b": torch.zeros(2, 3, 128, 128),
            "m": torch.zeros(2, 3, 128, 128),
            "chains": (((0, 0, 0),),),
            "n_out": 1,
        }
        with pytest.raises(ValueError, match=message):
            state_chain.merge(**(arguments | change))

    def test_dtypes(self):
        maps = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16)
        with pytest.raises(TypeError, match="b must be float32"):
            state_chain.merge(maps, maps.float(), (((0, 0, 0),),), 1)
