"""Every exception that cake raises on its own account.

Wrong arguments of a call raise the built-in ValueError, TypeError or NotImplementedError; these classes are
for what a caller may want to tell apart. They live alone in this module so that any other may import them.
"""

from __future__ import annotations

__all__ = ["BuildError", "CakeError", "ConfigError", "NoBuildError", "ToolchainError", "UnknownOpError"]


class CakeError(Exception):
    """Base of cake's own exceptions."""


class ConfigError(CakeError, ValueError):
    """A configuration that contradicts itself, the deterministic mode, or what is installed."""


class UnknownOpError(CakeError, LookupError):
    """A name that no installed distribution declares; the message lists those that are."""


class ToolchainError(CakeError, RuntimeError):
    """nvcc or the host compiler is missing, or too old for the architecture."""


class BuildError(CakeError, RuntimeError):
    """A compile failed.

    Args:
        message: what was being built and what went wrong, in one sentence.
        command: the compiler's command line, ready to paste into a shell.
        output: what the compiler printed, both streams together.
        source: the source file, if the failure belongs to one.
    """

    def __init__(
        self, message: str, *, command: str = "", output: str = "", source: str | None = None
    ) -> None:
        super().__init__(message)
        self.command = command
        self.output = output
        self.source = source

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.source:
            parts.append(f"source: {self.source}")
        if self.command:
            parts.append(f"command: {self.command}")
        if self.output:
            parts.append(self.output.rstrip())
        return "\n".join(parts)


class NoBuildError(CakeError, RuntimeError):
    """A library would have to be compiled where that is forbidden (``no_build()``, CAKE_DISABLE_JIT)."""
