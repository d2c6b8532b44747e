"""Turning what a user wrote on the command line, in a mapping or in the environment into a value."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import Any

__all__ = ["coerce", "parse_bytes"]

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\Z")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def parse_bytes(text: str | int) -> int:
    """A number of bytes, plain or with a unit.

    268435456, "268435456", "256MiB", "1.5GiB", "256M" (binary, like MiB) and "256MB" (decimal) are all
    accepted.

    Raises:
        ValueError: it isn't such a number, is negative, or isn't a whole number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ValueError(f"expected a number of bytes such as 0 or 256MiB, got {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"expected a number of bytes of at least 0, got {text}")
        return text
    match = _BYTES.match(text.strip())
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(f"expected a number of bytes such as 0 or 256MiB, got {text!r}")
    amount = Fraction(match[1]) * unit
    if amount.denominator != 1:
        raise ValueError(f"expected a whole number of bytes, got {text!r}")
    return int(amount)


def _bool(value: Any) -> bool:
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        lowered = value.strip().lower()
        if lowered in _TRUE:
            return True
        if lowered in _FALSE:
            return False
    raise ValueError(f"expected true or false, got {value!r}")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value.strip())
        except ValueError:
            pass
    raise ValueError(f"expected a whole number, got {value!r}")


def _str(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {value!r}")
    return value


_KINDS = {"bool": _bool, "int": _int, "str": _str, "bytes": parse_bytes}


def coerce(kind: str, value: Any, choices: tuple[Any, ...] = ()) -> Any:
    """``value`` as "bool", "int", "str" or "bytes".

    Raises:
        ValueError: with what was expected and what came.
    """
    result = _KINDS[kind](value)
    if choices and result not in choices:
        raise ValueError(f"expected one of {', '.join(map(str, choices))}, got {value!r}")
    return result
