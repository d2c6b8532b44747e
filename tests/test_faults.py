"""docs/faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"`((?:gdn|kda|core|ops|tests)/[\w/]+\.py)(?:::(\w+))?`")


def test_every_named_test_is_there() -> None:
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    missing = []
    for row in rows:
        named = NAME.findall(row)
        assert named, row
        for path, test in named:
            package, _, rest = path.partition("/")
            folder = {"tests": "tests", "ops": "tests/ops"}.get(package, f"packages/cake-{package}/tests")
            file = ROOT / folder / rest
            if not file.is_file() or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
                missing.append(f"{path}::{test}")
    assert missing == []
