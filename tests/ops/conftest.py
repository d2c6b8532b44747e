"""What the tests of every op's contract share: the op, and calls of it as the op's own tests make them.

A test here runs once for every op that is installed. What can't be the same for all, such as the shape of the
gates and what their errors are judged by, comes from the conftest.py of each op's own tests. A test, or a
case of one, that one op alone has is parametrized by ``op`` itself, indirectly.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cake.core import op_spec, ops
from cake.core.testing import Limit, assert_bitwise_equal, assert_within, error_report
from cake.core.testing.markers import pytest_configure, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_runtest_setup"]

# Relative L2 errors of bf16 operands with fp32 sums: bf16 storage of a result alone costs 1.7e-3.
LIMITS = {
    "o": 5e-3,
    "ht": 4e-3,
    "dq": 6e-3,
    "dk": 6e-3,
    "dv": 6e-3,
    "dg": 6e-3,
    "dbeta": 6e-3,
    "dh0": 4e-3,
}
STATES = ("ht", "dh0")
# A state under total decay is below fp32: its error is judged against this.
LEAST_STATE = 1e-30
# A block of a few tokens has few values, which may all be small by chance: it counts as an average one.
BLOCK_FLOOR = 1.0
PACKAGES = Path(__file__).resolve().parents[2] / "packages"


@dataclass(frozen=True)
class Op:
    """An op under test.

    name: like "gdn".
    package: what ``import cake.<name>`` gives.
    own: the conftest.py of its own tests.
    """

    name: str
    package: ModuleType
    own: ModuleType

    @property
    def chunk(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """Its call, which takes a context too."""
        (name,) = (name for name in op_spec(self.name).entry_points if name.startswith("chunk_"))
        return getattr(self.package, name)

    @property
    def kcp_chunk(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """The call that a context is an argument of."""
        (name,) = (name for name in op_spec(self.name).entry_points if name.startswith("kcp_"))
        return getattr(self.package, name)

    def module(self, name: str) -> ModuleType:
        """A module of its package."""
        return importlib.import_module(f"{self.package.__name__}.{name}")


def _op(name: str) -> Op:
    file = PACKAGES / f"cake-{name}" / "tests" / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"cake_{name}_conftest", file)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by name.
    sys.modules[spec.name] = own
    spec.loader.exec_module(own)
    return Op(name, importlib.import_module(f"cake.{name}"), own)


OPS = {spec.name: _op(spec.name) for spec in ops() if (PACKAGES / f"cake-{spec.name}").is_dir()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`op`: every one. `tape`: arguments for what a forward keeps for its backward, each that the op has."""
    if "tape" in metafunc.fixturenames:
        tapes = [
            pytest.param(name, tape, id=f"{name}-{kept}")
            for name, op in OPS.items()
            for kept, tape in op.own.TAPES.items()
        ]
        metafunc.parametrize(("op", "tape"), tapes, indirect=["op"])
    elif not any("op" in _names(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize")):
        metafunc.parametrize("op", list(OPS), indirect=True)


def _names(given: str | Sequence[str]) -> Sequence[str]:
    """Of a parametrization's arguments."""
    return given.replace(" ", "").split(",") if isinstance(given, str) else given


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what one op alone has, where that op isn't installed."""
    here = Path(__file__).parent

    def known(item: pytest.Item) -> bool:
        return not item.path.is_relative_to(here) or item.callspec.params["op"] in OPS

    items[:] = [item for item in items if known(item)]


@pytest.fixture
def op(request: pytest.FixtureRequest) -> Op:
    return OPS[request.param]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)


@pytest.fixture(autouse=True)
def _unconfigured(op: Op, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from op.own.unconfigured(monkeypatch)


@pytest.fixture
def make(op: Op, device: torch.device) -> Callable[..., Any]:
    """Makes a random case on the device; the same arguments give the same values on every device."""
    return partial(op.own.make_case, device)


@pytest.fixture
def call(op: Op) -> Callable[..., dict[str, torch.Tensor]]:
    """Runs the op on a case, forward and backward, and returns results and gradients by name."""
    return op.own.run_case


@pytest.fixture
def truth(op: Op) -> Callable[[Any], dict[str, torch.Tensor]]:
    """What `call` should return, from the FP64 recurrence."""
    return op.own.true_results


@pytest.fixture
def assert_accurate(op: Op) -> Callable[..., None]:
    """Compares results of `call` with the truth: whole tensors, sequences and 64-token blocks."""

    def check(
        case: Any,
        got: dict[str, torch.Tensor],
        slack: float | dict[str, float] = 1.0,
        least_dg: float = op.own.ORDINARY_DG,
    ) -> None:
        expected = {name: x for name, x in op.own.true_results(case).items() if name in got}
        least = {"dg": least_dg, "ht": LEAST_STATE, "dh0": LEAST_STATE}
        report = error_report(
            got,
            expected,
            boundaries=case.boundaries,
            per_sequence=[name for name in STATES if name in got],
            least_rms={name: x for name, x in least.items() if name in got},
            block_floor=BLOCK_FLOOR,
        )
        factors = slack if isinstance(slack, dict) else dict.fromkeys(got, slack)
        limits = {name: LIMITS[name] * factors.get(name, 1.0) for name in got}
        # A call of few tokens is no more than one block, and held to a block's limit.
        few = case.q.shape[0] * case.q.shape[1] < 64
        assert_within(
            report, {name: Limit(2 * x, 2 * x, 2 * x) if few else Limit(x) for name, x in limits.items()}
        )

    return check


@pytest.fixture
def assert_same_bits() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]:
    """Compares two results of `call` bit by bit."""

    def check(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            assert_bitwise_equal(name, got[name], x)

    return check
