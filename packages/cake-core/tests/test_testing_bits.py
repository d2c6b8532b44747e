import math
import re
import struct

import pytest
import torch

from cake.core.testing import assert_bitwise_equal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8]


def nan_with_payload(payload):
    return torch.tensor(0x7FC00000 | payload, dtype=torch.int32).view(torch.float32).reshape(1)


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn]
)
def test_equal_tensors_of_every_dtype_pass(dtype):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert_bitwise_equal("x", x, x.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_message_holds_first_coordinate_values_and_count(dtype):
    expected = torch.zeros(2, 3, 4, dtype=dtype)
    actual = expected.clone()
    actual[1, 0, 2] = 2
    actual[1, 2, 3] = 3
    value = re.escape(repr(actual[1, 0, 2].item()))
    with pytest.raises(
        AssertionError, match=rf"dq: 2 of 24 elements differ; the first is at \[1, 0, 2\]: {value} "
    ):
        assert_bitwise_equal("dq", actual, expected)


def test_message_holds_the_bits():
    with pytest.raises(AssertionError, match=r"-1.0 \(0xbf800000\) against expected 1.0 \(0x3f800000\)"):
        assert_bitwise_equal("x", torch.tensor([-1.0]), torch.tensor([1.0]))


def test_minus_zero_is_not_zero():
    with pytest.raises(AssertionError, match=r"-0.0 \(0x80000000\)"):
        assert_bitwise_equal("x", torch.tensor([-0.0]), torch.tensor([0.0]))


def test_nan_equals_its_own_payload_only():
    assert_bitwise_equal("x", torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert_bitwise_equal("x", nan_with_payload(5), nan_with_payload(5))
    with pytest.raises(AssertionError, match="0x7fc00005"):
        assert_bitwise_equal("x", nan_with_payload(5), nan_with_payload(6))


def test_one_unit_in_the_last_place_is_seen():
    x = torch.tensor([1.0])
    above = torch.tensor(struct.unpack("<f", struct.pack("<I", 0x3F800001))).to(torch.float32)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_bitwise_equal("x", above, x)


def test_complex_counts_elements_once():
    expected = torch.zeros(2, 2, dtype=torch.complex64)
    actual = expected.clone()
    actual[1, 0] = complex(1, 1)
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ; the first is at \[1, 0\]"):
        assert_bitwise_equal("x", actual, expected)


def test_lazy_negation_and_conjugation_are_applied_first():
    z = torch.tensor([1 + 2j])
    assert_bitwise_equal("conj", z.conj(), torch.tensor([1 - 2j]))
    assert_bitwise_equal("imag", z.conj().imag, torch.tensor([-2.0]))


def test_strides_dont_matter_and_scalars_work():
    x = torch.randn(4, 6)
    assert_bitwise_equal("x", x.t().contiguous(), x.t())
    assert_bitwise_equal("x", torch.zeros(1).expand(5), torch.zeros(5))
    assert_bitwise_equal("x", torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(AssertionError, match=r"the first is at \[\]"):
        assert_bitwise_equal("x", torch.tensor(1.0), torch.tensor(2.0))


def test_shape_and_dtype_count():
    with pytest.raises(AssertionError, match=r"\[1, 2\] against expected torch.float32 \[2, 1\]"):
        assert_bitwise_equal("x", torch.zeros(1, 2), torch.zeros(2, 1))
    with pytest.raises(AssertionError, match=r"torch\.float64"):
        assert_bitwise_equal("x", torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_none_equals_none_alone():
    assert_bitwise_equal("dbeta", None, None)
    with pytest.raises(
        AssertionError, match=r"dbeta: one is None: None against expected torch.float32 \[2\]"
    ):
        assert_bitwise_equal("dbeta", None, torch.zeros(2))
    with pytest.raises(AssertionError, match="one is None"):
        assert_bitwise_equal("dbeta", torch.zeros(2), None)
