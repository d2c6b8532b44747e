"""The walk through vendoring in docs/vendoring.md runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_walk_through_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/vendoring.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert script.count("refused cake vendor") == 4
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "cake").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cake.core "$@"\n')
    (bin / "cake").chmod(0o755)
    path = os.pathsep.join([str(bin), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "toy: ok"
    for said in ("common/util.py was changed", "walk/host.py:1: imports", "util.py:1: reads the environment"):
        assert said in done.stdout + done.stderr
