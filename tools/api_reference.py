#!/usr/bin/env python3
"""Write the API reference from the docstrings: python3 tools/api_reference.py OUT

Public is what the packages' `__all__` name. Those names load when first used, so they are loaded here before
pdoc looks. Exit 1 if a public function or class has no docstring.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def modules() -> list[Any]:
    """cake.core with its public modules, and every op."""
    names = sorted(
        path.parent.name.replace("cake-", "cake.", 1) for path in ROOT.glob("packages/*/pyproject.toml")
    )
    found = [importlib.import_module(name) for name in names]
    for module in found:
        for name in module.__all__:
            setattr(module, name, getattr(module, name))
    return found


def undocumented(found: list[Any]) -> list[str]:
    """Public functions and classes without a docstring."""
    missing = []
    for module in found:
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not (getattr(value, "__doc__", None) or "").strip():
                missing.append(f"{module.__name__}.{name}")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the HTML")
    out = parser.parse_args().out
    import pdoc

    found = modules()
    missing = undocumented(found)
    for name in missing:
        print(f"{name} has no docstring")
    extra = ["cake.core.bench", "cake.core.fla", "cake.core.verify"]
    pdoc.render.configure(docformat="google", footer_text="cake")
    pdoc.pdoc(*(module.__name__ for module in found), *extra, output_directory=out)
    print(f"written: {out / 'index.html'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
