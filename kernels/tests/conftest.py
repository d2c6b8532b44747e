"""Marks of the suite, and the emulator: gpu tests skip by themselves where there is no GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest

from cake.core import ToolchainError, recording, tables, toolchain
from cake.core.testing.markers import pytest_configure, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_runtest_setup"]

SOURCE = Path(__file__).parents[1] / "emulator" / "emulator.py"


@pytest.fixture(scope="session")
def emulator():
    """The module `emulator`; without a C++ compiler the test is skipped, and where its fibers can't run."""
    if sys.platform != "linux":
        pytest.skip("the emulator needs Linux")
    try:
        toolchain.host_compiler()
    except ToolchainError as error:
        pytest.skip(f"the emulator needs a C++ compiler: {error}")
    spec = importlib.util.spec_from_file_location("emulator", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def emulate(emulator, monkeypatch):
    """`emulate(backend)`: an op's module `_cuda` with the emulator's libraries, scheduled by its `seed` for
    `multiprocessors`."""

    loaded = {}

    def patched(backend):
        csrc = Path(backend.__file__).parent / "csrc"

        def library(name, folder=csrc):
            found = loaded.get((folder, name))
            if found is None:
                found = loaded[folder, name] = emulator.load(folder, name)
            found.schedule(backend.seed, backend.multiprocessors)
            return found

        merge = csrc.parent / "_vendor" / "state_chain"
        monkeypatch.setattr(backend, "_library", library)
        monkeypatch.setattr(backend, "_merges", lambda: library("affine_merge", merge), raising=False)
        monkeypatch.setattr(tables, "_capturing", lambda device: True)  # torch's own answer needs CUDA
        for module in (tables, recording):
            monkeypatch.setattr(module, "stream_of", lambda device: 0)
        monkeypatch.setattr(backend, "_ctas", lambda device: 2)  # so that a persistent CTA has several chunks
        monkeypatch.setattr(backend, "seed", 0, raising=False)
        monkeypatch.setattr(backend, "multiprocessors", 132, raising=False)
        return backend

    return patched
