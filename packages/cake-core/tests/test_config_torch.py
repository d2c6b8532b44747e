"""torch.use_deterministic_algorithms counts as a deterministic mode; torch is never imported for it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from cake.core import config
from cake.core.errors import ConfigError

torch = pytest.importorskip("torch")


@pytest.fixture
def mode() -> Iterator[Any]:
    """``torch.use_deterministic_algorithms``, undone afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


def test_an_unconfigured_process_is_deterministic_then(op: Any, mode: Any) -> None:
    assert not config.deterministic()
    assert config.variant(op.name, "fast") == "fast"
    mode(True)
    assert config.deterministic()
    assert config.variant(op.name) == "det"
    with pytest.raises(ConfigError, match=r"is fast and torch\.use_deterministic_algorithms"):
        config.variant(op.name, "fast")
    mode(False)
    assert not config.deterministic()
    assert config.variant(op.name, "fast") == "fast"


def test_with_a_configured_fast_the_call_raises(op: Any, mode: Any) -> None:
    mode(True)
    config.configure(op.args(variant="fast"))  # the mode may still be turned off before the first call
    with pytest.raises(ConfigError) as caught:
        config.variant(op.name)
    assert f"--cake-{op.name}-variant is fast" in str(caught.value)
    assert "torch.use_deterministic_algorithms(True)" in str(caught.value)
    mode(False)
    assert config.variant(op.name) == "fast"
    mode(True)
    with pytest.raises(ConfigError):
        config.variant(op.name)


def test_with_the_fast_that_a_selected_op_gets_the_call_raises_too(op: Any, mode: Any) -> None:
    config.configure(op.args())
    mode(True)
    with pytest.raises(ConfigError, match="configure det, or turn torch's mode off"):
        config.variant(op.name)
    assert config.variant(op.name, "det") == "det"


def test_a_configured_det_runs(op: Any, mode: Any) -> None:
    mode(True)
    for args in (op.args(variant="det"), op.args(deterministic_mode=True), {op.option: "other"}):
        config.configure(args)
        assert config.variant(op.name) == "det"


def test_an_op_without_det_raises(toy: Any, mode: Any) -> None:
    config.configure({toy.option: "fastonly"})
    mode(True)
    with pytest.raises(ConfigError, match="is fast and torch"):
        config.variant("fastonly")


def test_warn_only_warns(op: Any, mode: Any) -> None:
    config.configure(op.args(variant="fast"))
    mode(True, warn_only=True)
    with pytest.warns(UserWarning, match="is fast and torch"):
        assert config.variant(op.name) == "fast"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.variant(op.name, "det") == "det"


def test_validate_args_looks_at_the_arguments_alone(op: Any, mode: Any) -> None:
    # A launcher and its workers must resolve the same, whatever torch's mode is in each of them.
    mode(True)
    args = op.args()
    config.validate_args(args)
    assert args[f"cake_{op.name}_variant"] == "fast"


def test_what_is_printed_says_whose_mode_it_is(op: Any, mode: Any) -> None:
    rows = {row.name: row for row in config.resolved()}
    assert (rows["deterministic"].value, rows["deterministic"].source) == (False, "default")
    mode(True)
    rows = {row.name: row for row in config.resolved()}
    assert (rows["deterministic"].value, rows["deterministic"].source) == (
        True,
        "torch.use_deterministic_algorithms",
    )
    config.configure(op.args(deterministic_mode=True))
    rows = {row.name: row for row in config.resolved()}
    assert rows["deterministic"].source == "configure()"
    assert rows[f"{op.name}.variant"].source == "deterministic mode"


def test_a_process_without_torch_is_asked_nothing() -> None:
    code = (
        "import sys\n"
        "from cake.core import config\n"
        "assert not config.deterministic()\n"
        "config.resolved()\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = type(sys)('torch')\n"  # as while another thread is importing it
        "assert not config.deterministic()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
