"""The API reference is made of docstrings: every public function and class has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_everything_public_is_documented() -> None:
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.modules()
    assert {module.__name__ for module in found} >= {"cake.core", "cake.gdn", "cake.kda"}
    assert script.undocumented(found) == []
    found[0].undocumented = type("undocumented", (), {})
    found[0].__all__.append("undocumented")
    try:
        assert script.undocumented(found) == ["cake.core.undocumented"]
    finally:
        found[0].__all__.remove("undocumented")
        del found[0].undocumented
