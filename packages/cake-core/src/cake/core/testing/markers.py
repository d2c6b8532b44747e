"""Pytest hooks for the markers ``gpu``, ``nvcc`` and ``slow``; a package's conftest.py imports them by name.

    from cake.core.testing.markers import pytest_configure, pytest_runtest_setup

``@pytest.mark.gpu`` needs a CUDA GPU, ``@pytest.mark.gpu("sm_90a")`` one of that architecture, and
``@pytest.mark.nvcc`` a CUDA compiler; without it the test is skipped and the reason says what was missing.
``@pytest.mark.slow`` is for what takes ten seconds on two cores: the compatibility matrix leaves it out.
"""

from __future__ import annotations

import functools

import pytest

__all__ = ["pytest_configure", "pytest_runtest_setup"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", "gpu(arch=None): needs a CUDA GPU, of the given architecture if any")
    config.addinivalue_line("markers", "nvcc: needs a CUDA compiler")
    config.addinivalue_line("markers", "slow: takes ten seconds or more on two cores")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose GPU or compiler isn't there."""
    for mark in item.iter_markers("gpu"):
        wanted = mark.args[0] if mark.args else mark.kwargs.get("arch")
        found = _gpu_arch()
        if found is None:
            pytest.skip("needs a CUDA GPU")
        if wanted is not None and found != wanted:
            pytest.skip(f"needs a GPU of architecture {wanted}, this one is {found}")
    if item.get_closest_marker("nvcc") is not None and (missing := _nvcc_missing()) is not None:
        pytest.skip(f"needs a CUDA compiler: {missing}")


@functools.cache
def _gpu_arch() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    from cake.core.toolchain import device_arch

    return str(device_arch(torch.device("cuda", torch.cuda.current_device())))


@functools.cache
def _nvcc_missing() -> str | None:
    from cake.core.errors import ToolchainError
    from cake.core.toolchain import find_nvcc

    try:
        find_nvcc()
    except ToolchainError as error:
        return str(error)
    return None
