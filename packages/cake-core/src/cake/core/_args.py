"""One way to read and write what a framework passes: a Namespace, a mapping, or an object like one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

__all__ = ["Args"]

_REFUSED = (str, bytes, int, float, list, tuple, set, frozenset, type)


class Args:
    """Named values over a mapping or an object with attributes, with keyword overrides on top.

    Args:
        source: a Mapping, an argparse Namespace, any object with attributes, or None for nothing.
        overrides: win over ``source``.
        what: the caller's name, for error messages.

    Raises:
        TypeError: ``source`` is none of these.
    """

    def __init__(self, source: Any, overrides: Mapping[str, Any] | None = None, *, what: str) -> None:
        if isinstance(source, _REFUSED) or callable(source):
            raise TypeError(f"{what} takes a Namespace or a mapping, got {type(source).__name__}")
        self._source = {} if source is None else source
        self._overrides = dict(overrides or {})
        self._what = what

    def get(self, name: str) -> Any:
        """The value called ``name``, or None."""
        if name in self._overrides:
            return self._overrides[name]
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        return getattr(self._source, name, None)

    def names(self) -> Iterable[str]:
        """Every name that can be listed; an object without ``__dict__`` lists only its overrides."""
        if isinstance(self._source, Mapping):
            own = [name for name in self._source if isinstance(name, str)]
        else:
            own = list(getattr(self._source, "__dict__", ()))
        return [*own, *(name for name in self._overrides if name not in own)]

    def as_dict(self) -> dict[str, Any]:
        """All listed values, as a new dict."""
        return {name: self.get(name) for name in self.names()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Put ``values`` back into what the framework passed.

        Raises:
            TypeError: it can't be written to; nothing has been written then.
        """
        if isinstance(self._source, Mapping):
            if not isinstance(self._source, MutableMapping):
                raise TypeError(
                    f"{self._what} writes back what it resolved, so it takes a Namespace or a "
                    f"mutable mapping, got {type(self._source).__name__}"
                )
            self._source.update(values)
            return
        before = {name: getattr(self._source, name, None) for name in values}
        done: list[str] = []
        try:
            for name, value in values.items():
                setattr(self._source, name, value)
                done.append(name)
        except (AttributeError, TypeError) as error:
            for name in done:
                setattr(self._source, name, before[name])
            raise TypeError(
                f"{self._what} writes back what it resolved; {type(self._source).__name__} refuses: {error}"
            ) from error
