"""configure replaces the whole configuration, all or nothing, for every thread at once."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from cake.core import config
from cake.core.errors import ConfigError, UnknownOpError


def state() -> list[config.Row]:
    return config.resolved()


def test_a_second_configure_keeps_nothing_of_the_first(op: Any) -> None:
    config.configure(op.args(variant="det", recompute_state=True, cake_workspace_pool_bytes=99, cake_jobs=3))
    config.configure(op.args())
    assert config.variant(op.name) == "fast"
    assert config.option(op.name, "recompute_state") is False
    assert config.pool_bytes() == 0
    assert config.setting("jobs").source == "default"
    config.configure()
    assert config.variant(op.name) == "det"
    config.configure(deterministic_mode=True)
    assert config.deterministic()
    config.configure()
    assert not config.deterministic()


@pytest.mark.parametrize(
    "wrong",
    [
        {"variant": "slow"},
        {"variant": "fast", "deterministic_mode": True},
        {"recompute_state": "maybe"},
        {"cake_workspace_pool_bytes": "lots"},
        {"cake_log": "loud"},
        {"cake_nobody_variant": "det"},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_an_invalid_configure_leaves_the_old_one(op: Any, wrong: dict[str, Any]) -> None:
    config.configure(op.args(variant="det", recompute_state=True, cake_workspace_pool_bytes=99))
    before = state()
    with pytest.raises(ConfigError):
        config.configure(op.args(**wrong))
    assert state() == before


def test_what_is_found_last_leaves_the_old_one_too(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.configure(op.args(variant="det"))
    before = state()
    with pytest.raises(ConfigError):
        config.configure(op.args(), require={op.name: "==99"})
    with pytest.raises(UnknownOpError):
        config.configure(op.args(), require={"nobody": "==1"})
    with pytest.raises(TypeError):
        config.configure(op.args(), require=["gdn"])  # type: ignore[arg-type]
    assert state() == before
    monkeypatch.setenv("CAKE_JOBS", "many")
    with pytest.raises(ConfigError, match=r"CAKE_JOBS.*'many'"):
        config.configure(op.args())
    assert config.variant(op.name) == "det"


def test_an_invalid_configure_leaves_the_process_unconfigured(op: Any) -> None:
    with pytest.raises(ConfigError):
        config.configure(op.args(variant="slow"))
    assert not config.configured()
    assert config.variant(op.name) == "det"


class Slotted:
    """An object with attributes and no __dict__."""

    __slots__ = ("cake_gdn_variant", "cake_toy_variant", "linear_attention_backend", "toy_backend")

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


@pytest.mark.parametrize("make", [dict, MappingProxyType, Slotted])
def test_a_mapping_or_any_object_with_attributes_will_do(op: Any, make: Any) -> None:
    config.configure(make(op.args(variant="det")))
    assert config.variant(op.name) == "det"
    config.configure(make(op.args()))
    assert config.variant(op.name) == "fast"


@pytest.mark.parametrize("make", [argparse.Namespace, SimpleNamespace])
def test_a_namespace_will_do(op: Any, make: Any) -> None:
    config.configure(make(**op.args(variant="det")))
    assert config.variant(op.name) == "det"


@pytest.mark.parametrize("wrong", ["det", 3, ["a"], ("a", "b"), {"a"}, argparse.Namespace, b"", print])
def test_anything_else_is_refused(op: Any, wrong: Any) -> None:
    for call in (config.configure, config.validate_args):
        with pytest.raises(TypeError, match="takes a Namespace or a mapping"):
            call(wrong)


def test_keywords_win_over_the_arguments(op: Any) -> None:
    args = argparse.Namespace(**op.args())
    config.validate_args(args)
    config.configure(args, **{f"cake_{op.name}_variant": "det"})
    assert config.variant(op.name) == "det"
    config.configure(**op.args(variant="fast"))
    assert config.variant(op.name) == "fast"


def test_a_later_change_of_what_was_passed_changes_nothing(op: Any) -> None:
    args = argparse.Namespace(**op.args(variant="det"))
    config.configure(args)
    setattr(args, f"cake_{op.name}_variant", "fast")
    assert config.variant(op.name) == "det"


def test_temporary_puts_the_old_one_back_after_an_error_too(op: Any) -> None:
    with config.temporary(op.args()):
        assert config.variant(op.name) == "fast"
    assert not config.configured()
    config.configure(op.args(variant="det"))
    with pytest.raises(RuntimeError, match="where fast runs"), config.temporary(op.args()):
        raise RuntimeError(f"inside, where {config.variant(op.name)} runs")
    assert config.variant(op.name) == "det"
    with pytest.raises(ConfigError), config.temporary(op.args(variant="slow")):
        pass
    assert config.variant(op.name) == "det"


def test_readers_never_see_half_of_a_configuration(op: Any) -> None:
    # The two configurations differ in variant, flag and pool at once: what a reader takes from one record
    # must belong together. Two writers, one whose configure always fails, and four readers run at once.
    one = op.args(variant="det", recompute_state=True, cake_workspace_pool_bytes=1)
    two = op.args(variant="fast", recompute_state=False, cake_workspace_pool_bytes=2)
    good = {("det", True, 1), ("fast", False, 2)}
    config.configure(one)
    done, seen, errors = threading.Event(), set(), []

    def write(args: dict[str, Any]) -> None:
        while not done.is_set():
            config.configure(args)

    def fail() -> None:
        while not done.is_set():
            try:
                config.configure(op.args(variant="slow", recompute_state=True, cake_workspace_pool_bytes=3))
            except ConfigError:
                continue
            errors.append("an invalid configure passed")

    def read() -> None:
        for _ in range(1500):
            snapshot = config._state
            assert snapshot is not None
            settings = snapshot.ops[op.name]
            pool = snapshot.settings["workspace_pool_bytes"]
            seen.add((settings.variant.value, settings.options["recompute_state"].value, pool))
            if config.variant(op.name) not in ("det", "fast") or config.pool_bytes() not in (1, 2):
                errors.append("half a configuration")

    writers = [threading.Thread(target=write, args=(args,)) for args in (one, two)] + [
        threading.Thread(target=fail)
    ]
    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    for thread in writers:
        thread.join()
    assert not errors
    assert seen <= good


def test_every_thread_runs_what_the_process_configured(op: Any) -> None:
    config.configure(op.args())
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(config.variant(op.name)))
    thread.start()
    thread.join()
    assert found == ["fast"]
