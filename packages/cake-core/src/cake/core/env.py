"""The environment variables that cake reads: one table, one way to read them."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable", "get"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it does, and what happens while it is unset."""

    name: str
    help: str
    default: str


VARIABLES: tuple[Variable, ...] = (
    Variable("CAKE_CACHE_DIR", "folder of compiled libraries", "the user's cache folder"),
    Variable(
        "CAKE_CACHE_READONLY_DIRS",
        "more folders of compiled libraries, searched after the first and never written to; ':' between them",
        "none",
    ),
    Variable(
        "CAKE_CUDA_ARCH_LIST",
        "architectures that `cake prebuild` builds, like '9.0a;10.0a'",
        "the device's own",
    ),
    Variable("CAKE_NVCC", "path of the nvcc to use", "looked for in CUDA_HOME, CUDA_PATH, PATH, PyPI wheels"),
    Variable("CAKE_JOBS", "compilers that run at once", "MAX_JOBS, else the number of usable CPUs"),
    Variable("CAKE_DISABLE_JIT", "1: never compile in this process, use prebuilt libraries only", "0"),
    Variable("CAKE_LOG", "level of the logger 'cake': debug, info, warning, error, critical", "warning"),
    Variable("CAKE_FLA", "1: register the installed ops as backends of flash-linear-attention", "0"),
    Variable("NVCC_CCBIN", "C++ compiler that nvcc runs for host code", "g++ on PATH"),
    Variable("MAX_JOBS", "read where CAKE_JOBS is unset", "the number of usable CPUs"),
    Variable("CUDA_HOME", "root of a CUDA toolkit", "not looked into"),
    Variable("CUDA_PATH", "root of a CUDA toolkit, read after CUDA_HOME", "not looked into"),
)

_NAMES = frozenset(variable.name for variable in VARIABLES)


def get(name: str, default: str | None = None) -> str | None:
    """The value of an environment variable; an empty or blank value counts as unset.

    Args:
        name: a name of ``VARIABLES``.
        default: returned where the variable is unset.

    Raises:
        LookupError: the table has no such variable, so that no part of cake can read one that nobody
            documented.
    """
    if name not in _NAMES:
        raise LookupError(f"{name} is not in cake.core.env.VARIABLES")
    value = os.environ.get(name, "").strip()
    return value if value else default
