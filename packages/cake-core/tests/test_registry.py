"""Ops appear by being installed, and a broken one takes nobody with it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from cake.core import registry
from cake.core.errors import CakeError, ConfigError, UnknownOpError
from cake.core.spec import OpSpec
from cake.core.testing import installed_distribution

SPEC = """
from cake.core.spec import OpSpec

SPEC = OpSpec({name!r}, {dist!r}, entry_points={{"f": "{module}_api:f"}})
"""


def one_op(folder: Path, name: str, dist: str | None = None) -> Any:
    """A distribution that declares one op called ``name``."""
    dist = dist or f"cake-{name}"
    module = dist.replace("-", "_")
    files = {
        f"{module}.py": SPEC.format(name=name, dist=dist, module=module),
        f"{module}_api.py": "def f(): return 1\n",
    }
    return installed_distribution(folder, dist, ops={name: f"{module}:SPEC"}, files=files)


def names() -> list[str]:
    return [spec.name for spec in registry.ops()]


def test_an_installed_op_appears_by_itself_and_goes_with_its_distribution(tmp_path: Path) -> None:
    before = names()
    with one_op(tmp_path, "pear"):
        assert names() == sorted([*before, "pear"])
        assert registry.op_spec("pear").distribution == "cake-pear"
    assert names() == before
    with pytest.raises(UnknownOpError):
        registry.op_spec("pear")


def test_an_unknown_op_lists_the_installed_ones(tmp_path: Path) -> None:
    pear, plum = one_op(tmp_path / "a", "pear"), one_op(tmp_path / "b", "plum")
    with pear, plum, pytest.raises(UnknownOpError) as caught:
        registry.op_spec("appel")
    assert "'appel'" in str(caught.value)
    assert "pear" in str(caught.value)
    assert "plum" in str(caught.value)
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, CakeError)


def test_entry_points_are_imported_when_first_used(tmp_path: Path) -> None:
    with one_op(tmp_path, "pear"):
        assert "cake_pear_api" not in sys.modules
        registry.op_spec("pear")
        assert "cake_pear_api" not in sys.modules
        assert registry.entry("pear", "f")() == 1
        assert "cake_pear_api" in sys.modules
        with pytest.raises(UnknownOpError, match=r"'pear'.*'g'.*: f"):
            registry.entry("pear", "g")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise RuntimeError('no luck')", ["RuntimeError", "no luck"]),
        ("import not_installed_anywhere", ["ModuleNotFoundError", "not_installed_anywhere"]),
        ("SPEC = 3", ["OpSpec", "int"]),
        ("from cake.core.spec import OpSpec\nSPEC = OpSpec('other', 'cake-bad')", ["'bad'", "'other'"]),
        ("", ["AttributeError", "SPEC"]),
    ],
    ids=["raises", "import", "type", "name", "missing"],
)
def test_a_broken_declaration_is_named_and_leaves_the_others_usable(
    tmp_path: Path, text: str, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    bad = installed_distribution(
        tmp_path / "a", "cake-bad", ops={"bad": "cake_bad:SPEC"}, files={"cake_bad.py": text}
    )
    with bad, one_op(tmp_path / "b", "pear"), caplog.at_level(logging.WARNING, "cake"):
        assert "pear" in names()
        assert "bad" not in names()
        assert list(registry.broken()) == ["bad"]
        assert "cake-bad" in caplog.text
        with pytest.raises(ConfigError) as caught:
            registry.op_spec("bad")
    for word in words:
        assert word in str(caught.value)


def test_two_distributions_of_one_op_are_refused_and_both_named(tmp_path: Path) -> None:
    with one_op(tmp_path / "a", "pear", "cake-pear"), one_op(tmp_path / "b", "pear", "other-pear"):
        with pytest.raises(ConfigError) as caught:
            registry.op_spec("pear")
        assert "pear" not in names()
    assert "cake-pear" in str(caught.value)
    assert "other-pear" in str(caught.value)


def test_one_distribution_found_twice_is_no_conflict(tmp_path: Path) -> None:
    with one_op(tmp_path / "a", "pear"), one_op(tmp_path / "b", "pear"):
        assert "pear" in names()


def test_refresh_looks_again(tmp_path: Path) -> None:
    with one_op(tmp_path, "pear"):
        assert "pear" in names()
        for path in (tmp_path / "cake_pear-1.0.dist-info").iterdir():
            path.unlink()
        assert "pear" in names()
        registry.refresh()
        assert "pear" not in names()


def test_gdn_is_found_where_it_is_installed() -> None:
    pytest.importorskip("cake.gdn", reason="cake-gdn is not installed")
    spec = registry.op_spec("gdn")
    assert isinstance(spec, OpSpec)
    assert spec.distribution == "cake-gdn"
    assert spec.selection is not None
    assert (spec.selection.option, spec.selection.value) == ("linear_attention_backend", "cake")
    assert set(spec.variants) == {"det", "fast"}
    assert "chunk_gated_delta_rule" in spec.entry_points
    assert "recompute_state" in {flag.key for flag in spec.flags}
