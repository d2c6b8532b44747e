"""Every measured table in the documents is what the committed results say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "tools" / "measured.py"


def run(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)


def test_documents_say_what_was_measured():
    done = run(MEASURED, "--check")
    assert done.returncode == 0, done.stdout


def test_a_stale_table_is_found_and_mended(tmp_path):
    benchmarks = [f"packages/cake-{name}/benchmarks" for name in ("core", "gdn", "kda")]
    for name in ("README.md", "docs", "tools", *benchmarks):
        source, target = ROOT / name, tmp_path / name
        for path in [source] if source.is_file() else source.rglob("*"):
            if path.is_file() and path.suffix in {".md", ".py", ".json", ".png"}:
                copy = target if source.is_file() else target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    readme = tmp_path / "README.md"
    good = readme.read_text()
    readme.write_text(good.replace("| (16, 48) |", "| (16, 49) |", 1))
    script = tmp_path / "tools" / "measured.py"
    done = run(script, "--check")
    assert (done.returncode, done.stdout) == (1, "README.md: differs from its results\n")
    assert run(script).returncode == 0
    assert readme.read_text() == good
    # Other results: the picture is stale, too.
    pytest.importorskip("matplotlib")
    results = tmp_path / "packages/cake-gdn/benchmarks/results/h200.json"
    document = json.loads(results.read_text())
    document["rows"][0]["gpu_ms"] *= 2
    results.write_text(json.dumps(document))
    done = run(script, "--check")
    assert done.returncode == 1
    assert "docs/gdn-h200.png: differs from its results\n" in done.stdout
    assert run(script).returncode == 0
    assert run(script, "--check").returncode == 0
