"""Functions that no compiler looks into, marked without importing one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, but for its import of torch._dynamo, which takes seconds."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*arguments, **named)

    # What torch.compiler.disable leaves on a function: a tracer stops in front of it.
    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = None
    marked._torchdynamo_disable_recursive = True
    marked._torchdynamo_orig_callable = function
    return call
