"""Core's own settings: where each may come from, and what it is while nobody sets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import env
from ._values import coerce
from .errors import ConfigError

__all__ = ["DEFAULT", "SETTINGS", "CoreSetting", "Setting", "resolve"]

CALL = "call argument"
CONFIGURE = "configure()"
DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value and where it came from: "call argument", "configure()", "environment CAKE_…" or "default"."""

    value: Any
    source: str


@dataclass(frozen=True)
class CoreSetting:
    """One setting of core. ``configure`` knows it as ``cake_<name>``; ``variables`` are read in order."""

    name: str
    kind: str
    help: str
    variables: tuple[str, ...] = ()
    default: Any = None
    choices: tuple[Any, ...] = ()
    at_least: int | None = None

    @property
    def key(self) -> str:
        return f"cake_{self.name}"

    def parse(self, value: Any, where: str) -> Any:
        """``value`` in its kind.

        Raises:
            ConfigError: naming ``where`` it came from, what was expected and what came.
        """
        try:
            if self.name == "log" and isinstance(value, str):
                value = value.lower()
            result = coerce(self.kind, value, self.choices)
            if self.at_least is not None and result < self.at_least:
                raise ValueError(f"expected at least {self.at_least}, got {value!r}")
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        return result


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

SETTINGS: Mapping[str, CoreSetting] = {
    setting.name: setting
    for setting in (
        CoreSetting("cache_dir", "str", "folder of compiled libraries", ("CAKE_CACHE_DIR",)),
        CoreSetting(
            "cache_readonly_dirs",
            "str",
            "more folders of compiled libraries, never written to, ':' between them",
            ("CAKE_CACHE_READONLY_DIRS",),
        ),
        CoreSetting("cuda_arch_list", "str", "architectures to build for", ("CAKE_CUDA_ARCH_LIST",)),
        CoreSetting("nvcc", "str", "path of nvcc", ("CAKE_NVCC",)),
        CoreSetting("jobs", "int", "compilers that run at once", ("CAKE_JOBS", "MAX_JOBS"), at_least=1),
        CoreSetting(
            "disable_jit", "bool", "never compile in this process", ("CAKE_DISABLE_JIT",), default=False
        ),
        CoreSetting("log", "str", "level of the logger 'cake'", ("CAKE_LOG",), "warning", choices=LOG_LEVELS),
        CoreSetting(
            "fla", "bool", "register the ops with flash-linear-attention", ("CAKE_FLA",), default=False
        ),
        CoreSetting(
            "workspace_pool_bytes",
            "bytes",
            "scratch memory that each device and stream may keep between calls, like 256MiB; 0 keeps none",
            default=0,
        ),
    )
}


def is_unset(value: Any) -> bool:
    """None and blank text say nothing, wherever they stand."""
    return value is None or (isinstance(value, str) and not value.strip())


def resolve(name: str, configured: Mapping[str, Any], given: Any = None) -> Setting:
    """The value of a core setting: call argument, then configure(), then environment, then default.

    Args:
        name: a name of ``SETTINGS``.
        configured: what configure() was given, parsed.
        given: the call's own argument; None where it has none.

    Raises:
        LookupError: no such setting.
        ConfigError: the winning source holds something else than the setting's kind.
    """
    setting = SETTINGS.get(name)
    if setting is None:
        raise LookupError(f"no setting {name!r}; there are: {', '.join(SETTINGS)}")
    if not is_unset(given):
        return Setting(setting.parse(given, f"{name} (call argument)"), CALL)
    if name in configured:
        return Setting(configured[name], CONFIGURE)
    for variable in setting.variables:
        text = env.get(variable)
        if text is not None:
            return Setting(setting.parse(text, f"environment variable {variable}"), f"environment {variable}")
    return Setting(setting.default, DEFAULT)
