"""One namespace, several distributions: each comes, goes and changes without the others noticing.

Covers whatever lies in packages/. Nothing is imported that needs torch, so the environments hold cake alone.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
OPS = [name for name in NAMES if name != "cake-core"]
PAIRS = list(itertools.combinations(NAMES, 2))
KINDS = ("wheel", "editable")

pytestmark = pytest.mark.slow


def part(name: str) -> str:
    return name.removeprefix("cake-")


def install(environment: Any, house: Any, kinds: dict[str, str]) -> None:
    """Install some distributions, each as a wheel or editable, in this order."""
    wheels = [
        house.editable(name) if kind == "editable" else house.wheel(name) for name, kind in kinds.items()
    ]
    environment.pip("install", "-q", "--no-deps", "--force-reinstall", *wheels)


def places(environment: Any, names: list[str]) -> dict[str, Path]:
    """Where each is imported from, all in one process; the namespace itself is nobody's."""
    code = (
        "import importlib, cake\nassert getattr(cake, '__file__', None) is None\n"
        f"for name in {['cake.' + part(name) for name in names]}:\n"
        "    print(importlib.import_module(name).__file__)\n"
    )
    return dict(zip(names, map(Path, environment.python(code).splitlines()), strict=True))


def files(environment: Any, name: str) -> dict[str, str]:
    """Path -> hash of what an installed wheel has put into the environment, its metadata included."""
    info = name.replace("-", "_")
    here = [environment.site / "cake" / part(name), *environment.site.glob(f"{info}-*.dist-info")]
    found = (path for folder in here for path in folder.rglob("*") if path.is_file())
    kept = (path for path in found if path.suffix != ".pyc")
    return {str(p.relative_to(environment.site)): hashlib.sha256(p.read_bytes()).hexdigest() for p in kept}


def ops_of(environment: Any) -> str:
    return environment.python("from cake.core import ops; print(*sorted(spec.name for spec in ops()))")


@pytest.fixture
def environment(new_environment: Any) -> Any:
    """An empty one."""
    return new_environment()


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_two_of_any_kind(
    environment: Any, house: Any, pair: tuple[str, str], kinds: tuple[str, str]
) -> None:
    how = dict(zip(pair, kinds, strict=True))
    install(environment, house, {"cake-core": "wheel", **how})
    found = places(environment, list(pair))
    for name, place in found.items():
        assert place.is_relative_to(ROOT) == (how[name] == "editable")
        assert place.is_relative_to(environment.site) == (how[name] == "wheel")
    assert ops_of(environment) == " ".join(part(name) for name in pair if name != "cake-core")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_an_op_alone(environment: Any, house: Any, name: str, kind: str) -> None:
    """With cake-core, which it requires, and nothing of any other op."""
    install(environment, house, {"cake-core": kind, name: kind})
    places(environment, ["cake-core", name])
    assert ops_of(environment) == part(name)
    others = [part(other) for other in OPS if other != name]
    for other in others:
        code = f"import importlib.util; print(importlib.util.find_spec('cake.{other}'))"
        assert environment.python(code) == "None"
    if kind == "wheel":
        assert sorted(path.name for path in (environment.site / "cake").iterdir()) == sorted(
            ["core", part(name)]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_one_is_upgraded_downgraded_and_removed(
    environment: Any, house: Any, later: Any, name: str, kind: str
) -> None:
    """The others, wheels or editable, keep every byte and can be imported throughout."""
    others = [other for other in NAMES if other != name]
    install(environment, house, {**dict.fromkeys(others, kind), name: "wheel"})
    before = {other: files(environment, other) for other in NAMES}
    assert all(before.values())

    module = f"cake.{part(name)}"
    wheel = later(name, "98.0.0")
    environment.pip("install", "-q", "--no-deps", "--upgrade", wheel)
    assert environment.python(f"from {module} import _later; print(_later.VERSION)") == "98.0.0"
    assert environment.python(f"import {module} as m; print(m.__version__)") == "98.0.0"
    places(environment, NAMES)
    assert {other: files(environment, other) for other in others} == {o: before[o] for o in others}

    install(environment, house, {name: "wheel"})
    places(environment, NAMES)
    assert {other: files(environment, other) for other in NAMES} == before

    environment.pip("uninstall", "-q", "-y", name)
    assert {other: files(environment, other) for other in others} == {o: before[o] for o in others}
    assert not (environment.site / "cake" / part(name)).exists()
    if name != "cake-core":
        places(environment, others)
        assert ops_of(environment) == " ".join(part(other) for other in others if other != "cake-core")


@pytest.mark.parametrize("name", NAMES)
def test_an_editable_gives_way_to_a_wheel_and_comes_back(environment: Any, house: Any, name: str) -> None:
    install(environment, house, {other: "editable" if other == name else "wheel" for other in NAMES})
    for kind in ("wheel", "editable"):
        install(environment, house, {name: kind})
        found = places(environment, NAMES)
        assert found[name].is_relative_to(ROOT) == (kind == "editable")
        assert all(found[other].is_relative_to(environment.site) for other in NAMES if other != name)


def test_pip_itself_makes_them_editable(environment: Any) -> None:
    """All of them from the checkout, as CONTRIBUTING says."""
    environment.pip("install", "-q", "hatchling")
    words = [word for name in NAMES for word in ("-e", ROOT / "packages" / name)]
    environment.pip("install", "-q", "--no-deps", "--no-build-isolation", *words)
    assert all(place.is_relative_to(ROOT) for place in places(environment, NAMES).values())
    assert ops_of(environment) == " ".join(map(part, OPS))
