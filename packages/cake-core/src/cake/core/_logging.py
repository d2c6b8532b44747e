"""The logger "cake": its level, and a handler that prints only where nothing else would."""

from __future__ import annotations

import logging
import sys

__all__ = ["apply_environment", "set_level"]

_logger = logging.getLogger("cake")


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to stderr, unless the program has set up logging itself: then that prints."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        self.stream = sys.stderr
        super().emit(record)


_handler = _Handler()
_handler.setFormatter(logging.Formatter("[%(name)s] %(levelname)s: %(message)s"))


_before: int | None = None  # the level that the logger had before the first set_level


def set_level(level: str | None) -> None:
    """Set the level of the logger "cake": debug, info, warning, error or critical; None takes it back."""
    global _before
    if level is None:
        if _before is not None:
            _logger.setLevel(_before)
            _logger.removeHandler(_handler)
            _before = None
        return
    if _before is None:
        _before = _logger.level
        _logger.addHandler(_handler)
    _logger.setLevel(level.upper())


def apply_environment() -> None:
    """Apply CAKE_LOG and CAKE_FLA.

    What can't be applied is a warning here and an error of ``configure``: importing cake never fails for it.
    """
    from .errors import ConfigError
    from .settings import DEFAULT, resolve

    for name in ("log", "fla"):
        try:
            found = resolve(name, {})
        except ConfigError as error:
            _logger.warning("%s", error)
            continue
        if name == "log" and found.source != DEFAULT:
            set_level(found.value)
        if name == "fla" and found.value:
            from .fla import FlaError, register_ops

            try:
                register_ops()
            except FlaError as error:
                _logger.warning("CAKE_FLA is set and has no effect: %s", error)
