"""How numbers of bytes, truth values and numbers are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cake.core._values import coerce, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        ("0", 0),
        ("17", 17),
        (" 17 b ", 17),
        ("1KiB", 1024),
        ("1k", 1024),
        ("1kb", 1000),
        ("256MiB", 2**28),
        ("256mib", 2**28),
        ("256M", 2**28),
        ("256 MB", 256 * 10**6),
        ("2GiB", 2**31),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.5KiB", 512),
        ("1TiB", 2**40),
        (2**40, 2**40),
    ],
)
def test_bytes(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", -1, "1 XiB", "1.5", "0.3KiB", "1e9", "1_000", "ten", "1 2", None, 1.0, True]
)
def test_what_is_no_number_of_bytes(text: Any) -> None:
    with pytest.raises(ValueError, match="number of bytes") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("bool", True, True),
        ("bool", 0, False),
        ("bool", "YES", True),
        ("bool", "off", False),
        ("int", 3, 3),
        ("int", " -3 ", -3),
        ("str", "a", "a"),
        ("str", Path("/a/b"), "/a/b"),
        ("bytes", "1KiB", 1024),
    ],
)
def test_kinds(kind: str, value: Any, expected: Any) -> None:
    found = coerce(kind, value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("bool", 2), ("bool", "maybe"), ("bool", 0.0), ("int", True), ("int", 1.0), ("int", "1.0"), ("str", 1)],
)
def test_what_is_of_another_kind(kind: str, value: Any) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        coerce(kind, value)
    assert repr(value) in str(caught.value)


def test_choices() -> None:
    assert coerce("int", "2", (1, 2)) == 2
    with pytest.raises(ValueError, match="one of 1, 2, got 3"):
        coerce("int", 3, (1, 2))
