"""What the documentation says is so: its code runs, its links lead on, its tables match the source."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cake.core.env import VARIABLES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
CODE = [
    pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("code", CODE)
def test_code_runs(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_readme_has_code() -> None:
    assert any(parameter.id.startswith("README.md") for parameter in CODE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()
    ]
    assert broken == []


def test_readme_names_files_that_exist() -> None:
    """Whole paths in backticks, as in the table "Where is X"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:packages|kernels|examples|tools|docs)/[\w./-]+)`", text)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_environment_table_is_the_one_in_the_source() -> None:
    rows = [f"| `{v.name}` | {v.help} | {v.default} |" for v in VARIABLES]
    table = "\n".join(["| variable | what it does | while unset |", "|---|---|---|", *rows]) + "\n"
    text = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert text[text.index("| variable") :] == table
