"""Tests marked gpu or nvcc are skipped where there is none; every test starts and ends unconfigured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cake.core import config, env, registry
from cake.core.testing import installed_distribution, write_distribution
from cake.core.testing.markers import pytest_configure, pytest_runtest_setup
from cake.core.testing.toolchain import FakeToolkit

__all__ = ["pytest_configure", "pytest_runtest_setup"]

TOY_SPEC = """
from cake.core.spec import Flag, KernelPackage, OpSpec, Selection

SPEC = OpSpec(
    name="toy",
    distribution="cake-toy",
    summary="an op of the tests",
    selection=Selection("toy_backend", "cake"),
    kernel_packages=(KernelPackage("toy", "cake.toy", "csrc"),),
    entry_points={"twice": "cake.toy.api:twice"},
    flags=(
        Flag("recompute-state", help="100% of it"),
        Flag("depth", "int", 3, "how deep"),
        Flag("layout", "str", "flat", "how it lies", ("flat", "tall")),
        Flag("keep", "bytes", 0, "bytes to keep"),
    ),
    check_args="cake.toy.checks:check",
)
DET_ONLY = OpSpec("detonly", "cake-toy", variants=("det",), selection=Selection("toy_backend", "detonly"))
FAST_ONLY = OpSpec("fastonly", "cake-toy", variants=("fast",), selection=Selection("toy_backend", "fastonly"))
LOOSE = OpSpec("loose", "cake-toy", flags=(Flag("depth", "int", 3),))
"""

TOY_CHECKS = """
def check(args):
    if args["cake_toy_depth"] > 9:
        raise ValueError(f"depth must be at most 9, got {args['cake_toy_depth']}")
    if args["cake_toy_depth"] == 9 and args["cake_toy_variant"] == "fast":
        raise ValueError("depth 9 needs det")
"""

BUILD_JSON = """
{"schema": 1, "records": [{"library": "toy", "arch": "sm_90a", "sources": ["toy.cu"], "functions": ["toy"]}]}
"""

TOY_OPS = {
    "toy": "cake.toy.spec:SPEC",
    "detonly": "cake.toy.spec:DET_ONLY",
    "fastonly": "cake.toy.spec:FAST_ONLY",
    "loose": "cake.toy.spec:LOOSE",
}
TOY_FILES = {
    "cake/toy/__init__.py": "",
    "cake/toy/spec.py": TOY_SPEC,
    "cake/toy/checks.py": TOY_CHECKS,
    "cake/toy/api.py": "import torch\n\n\ndef twice(x):\n    return 2 * x\n",
    "cake/toy/csrc/build.json": BUILD_JSON,
    "cake/toy/csrc/toy.cu": "// nothing to run\n",
}


@dataclass(frozen=True)
class Op:
    """An op under test, and how a framework selects it."""

    name: str
    option: str
    value: str

    def args(self, **more: Any) -> dict[str, Any]:
        """Arguments that select the op; ``variant`` and ``recompute_state`` are its own options."""
        own = {f"cake_{self.name}_{k}": more.pop(k) for k in ("variant", "recompute_state") if k in more}
        return {self.option: self.value, **own, **more}


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration and no cake variable of the shell leaks into a test, or out of one."""
    for variable in env.VARIABLES:
        if variable.name.startswith("CAKE_") or variable.name == "MAX_JOBS":
            monkeypatch.delenv(variable.name, raising=False)
    config.reset()
    yield
    config.reset()


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeToolkit:
    """A fake CUDA toolkit, in a folder with a space in its name, that is the one in use."""
    found = FakeToolkit(tmp_path / "my toolkit")
    monkeypatch.setenv("CAKE_NVCC", str(found.nvcc))
    return found


@pytest.fixture
def toy_folder(tmp_path: Path) -> Path:
    """A folder with the throw-away distribution cake-toy 1.0, for the path of another process."""
    return write_distribution(tmp_path / "site", "cake-toy", ops=TOY_OPS, files=TOY_FILES)


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Op]:
    """cake-toy 1.0, installed for the length of the test: the ops toy, detonly, fastonly and loose."""
    with installed_distribution(tmp_path / "site", "cake-toy", ops=TOY_OPS, files=TOY_FILES):
        yield Op("toy", "toy_backend", "cake")


@pytest.fixture(params=["toy", "gdn"])
def op(request: pytest.FixtureRequest) -> Op:
    """The synthetic op, then gdn where it is installed: the rules hold for each."""
    if request.param == "toy":
        found: Op = request.getfixturevalue("toy")
        return found
    if "gdn" not in [spec.name for spec in registry.ops()]:
        pytest.skip("cake-gdn is not installed")
    return Op("gdn", "linear_attention_backend", "cake")
