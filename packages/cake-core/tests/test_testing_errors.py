import math

import pytest
import torch

from cake.core.testing import Limit, assert_within, error_report, relative_error


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_relative_error_is_the_l2_ratio_in_float64():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1, rel=1e-15)
    # 2**24 + 1 has no float32: in float32 arithmetic the difference would vanish.
    wide = torch.tensor([2.0**24 + 1], dtype=torch.float64)
    assert relative_error(torch.tensor([2.0**24]), wide) == pytest.approx(1 / (2**24 + 1), rel=1e-15)


def test_relative_error_of_bf16_rounding():
    x = rand(10_000)
    assert 1e-3 < relative_error(x.bfloat16(), x) < 2e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["actual", "expected"])
def test_what_is_not_finite_never_passes(bad, side):
    good, broken = rand(4, 4), rand(4, 4)
    broken[2, 1] = bad
    pair = (broken, good) if side == "actual" else (good, broken)
    assert relative_error(*pair) == math.inf
    assert relative_error(broken, broken) == math.inf


def test_relative_error_against_zero_and_of_nothing():
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == math.inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0


def test_relative_error_names_both_shapes():
    with pytest.raises(ValueError, match=r"\[2, 3\], got \[3, 2\]"):
        relative_error(rand(3, 2), rand(2, 3))


def test_report_finds_the_sequence_and_the_block():
    expected = rand(1, 300, 2, 8)
    actual = expected.clone()
    # Sequence 1 holds tokens 100..299, so its second block is 164..227.
    actual[0, 170] *= 2.0
    report = error_report({"o": actual}, {"o": expected}, boundaries=(0, 100, 300))
    o = report["o"]
    assert o.sequences[0] == 0.0
    assert o.sequences[1] > 0.0
    assert o.block_starts == ((0, 0), (0, 64), (1, 0), (1, 64), (1, 128), (1, 192))
    assert [error > 0 for error in o.blocks] == [False, False, False, True, False, False]
    assert o.worst_block == pytest.approx(relative_error(actual[0, 164:228], expected[0, 164:228]), rel=1e-12)
    assert o.worst_sequence == pytest.approx(relative_error(actual[0, 100:], expected[0, 100:]), rel=1e-12)
    assert o.error == relative_error(actual, expected)
    assert o.worst_block_at() == "sequence 1, tokens from 64"
    assert "sequence 1, tokens from 64" in str(report)


def test_report_of_a_batch_takes_rows_as_sequences():
    expected = rand(3, 70, 4)
    actual = expected.clone()
    actual[2, 69] = 0.0
    o = error_report({"dg": actual}, {"dg": expected})["dg"]
    assert len(o.sequences) == 3
    assert o.sequences[:2] == (0.0, 0.0)
    assert o.sequences[2] > 0.0
    assert o.block_starts[-1] == (2, 64)
    assert o.blocks[-1] > 0.0
    assert max(o.blocks[:-1]) == 0.0


def test_empty_sequences_have_no_blocks_and_no_error():
    expected = rand(1, 10, 2)
    o = error_report({"g": expected.clone()}, {"g": expected}, boundaries=(0, 0, 10, 10))["g"]
    assert o.sequences == (0.0, 0.0, 0.0)
    assert o.block_starts == ((1, 0),)


def test_states_and_whole_tensors_are_not_cut_into_blocks():
    state, weight = rand(2, 3, 4, 4), rand(7)
    wrong = state.clone()
    wrong[1] += 1.0
    report = error_report(
        {"ht": wrong, "dA": weight},
        {"ht": state, "dA": weight},
        boundaries=(0, 5, 9),
        per_sequence=("ht",),
        whole=("dA",),
    )
    assert report["ht"].sequences[0] == 0.0
    assert report["ht"].sequences[1] > 0.1
    assert report["ht"].blocks == ()
    assert report["dA"].sequences == ()
    assert report["dA"].error == 0.0


def test_block_with_next_to_no_reference_is_judged_by_the_floor():
    expected = torch.ones(1, 128, 4)
    expected[:, 64:] = 1e-6
    actual = expected.clone()
    actual[:, 64:] = 2e-6
    rms = math.sqrt(0.5)
    floored = error_report({"dg": actual}, {"dg": expected})["dg"]
    assert floored.blocks[1] == pytest.approx(1e-6 / (1e-2 * rms), rel=1e-5)
    bare = error_report({"dg": actual}, {"dg": expected}, block_floor=0.0)["dg"]
    assert bare.blocks[1] == pytest.approx(1.0, rel=1e-5)
    # The floor never hides an error of ordinary size.
    actual[:, 64:] = 0.1
    assert error_report({"dg": actual}, {"dg": expected})["dg"].blocks[1] > 1.0


def test_least_rms_judges_a_tensor_by_its_absolute_size():
    expected = torch.full((1, 64, 2), 1e-9)
    actual = torch.full((1, 64, 2), 3e-9)
    assert error_report({"dg": actual}, {"dg": expected})["dg"].error == pytest.approx(2.0)
    dg = error_report({"dg": actual}, {"dg": expected}, least_rms={"dg": 1e-3})["dg"]
    assert dg.error == pytest.approx(2e-6)
    assert dg.max_error == pytest.approx(2e-6)
    assert dg.worst_block == pytest.approx(2e-6)
    assert dg.worst_sequence == pytest.approx(2e-6)


def test_assert_within_passes_and_fails_per_tensor_sequence_and_block():
    expected = rand(1, 6400, 2)
    actual = expected.clone()
    actual[0, 130] += 4.0
    report = error_report({"o": actual}, {"o": expected})
    assert report["o"].error < 0.06 < 0.3 < report["o"].worst_block
    assert_within(report, {"o": Limit(0.06, block=1.0)})
    with pytest.raises(AssertionError, match=r"1 of 100 blocks above 1.200e-01.*sequence 0, tokens from 128"):
        assert_within(report, {"o": 0.06})
    with pytest.raises(AssertionError, match=r"o: error .*limit 1.000e-03"):
        assert_within(report, {"o": Limit(1e-3, sequence=1.0, block=1.0)})
    with pytest.raises(AssertionError, match=r"o: sequence 0: error"):
        assert_within(report, {"o": Limit(1.0, sequence=1e-3, block=1.0)})


def test_assert_within_refuses_nan_at_any_limit():
    expected = rand(1, 64, 2)
    actual = expected.clone()
    actual[0, 3, 1] = math.nan
    with pytest.raises(AssertionError, match="error inf"):
        assert_within(error_report({"o": actual}, {"o": expected}), {"o": 1e30})


def test_names_must_match():
    x = rand(1, 4, 2)
    with pytest.raises(ValueError, match=r"\['dk', 'dq'\], got \['dq'\]"):
        error_report({"dq": x}, {"dq": x, "dk": x})
    with pytest.raises(ValueError, match=r"per_sequence .*\['ht'\]"):
        error_report({"o": x}, {"o": x}, per_sequence=("ht",))
    report = error_report({"o": x}, {"o": x})
    with pytest.raises(ValueError, match=r"\['o'\], got \[\]"):
        assert_within(report, {})
    with pytest.raises(LookupError, match="'v'"):
        report["v"]


@pytest.mark.parametrize("boundaries", [(0,), (1, 4), (0, 3), (0, 3, 2, 4), (0, 5)])
def test_boundaries_must_fit(boundaries):
    x = rand(1, 4, 2)
    with pytest.raises(ValueError, match="boundaries must ascend from 0 to o's 4 tokens"):
        error_report({"o": x}, {"o": x}, boundaries=boundaries)
