"""The `cake` command. Its table names every subcommand; only the one that was asked for is imported.

A subcommand is a module with ``add_parser(subparsers)``, which adds a parser of its own name and returns it,
and ``run(args) -> int``, which returns the exit status: 0 for success, 1 for a trouble that was found.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("doctor", "doctor", "say what is installed and configured, and what would stop a run"),
    ("ops", "ops", "list the installed ops and their kernels"),
    ("prebuild", "prebuild", "compile everything an op can need, before it is needed"),
    ("cache", "cache", "show, clear, export or import compiled libraries"),
    ("manifest", "manifest", "print versions and kernel hashes as JSON, for a run's log"),
    ("vendor", "vendor", "copy kernel sources into an op, and check the copies"),
    ("verify", "verify", "prove on this machine that ops are accurate and repeat bit for bit"),
    ("bench", "bench", "time an op's passes on this machine"),
)
"""(command, module below ``cake.core.cli``, one line of help)."""


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version of cake-core and exit")

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from importlib.metadata import version

        print(f"cake-core {version('cake-core')}")
        parser.exit()


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cake", description="Linear-attention kernels: set up, check, build."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, help in COMMANDS:
        if name == wanted:
            loaded = import_module(f"{__name__}.{module}")
            loaded.add_parser(commands).set_defaults(_run=loaded.run)
        else:
            commands.add_parser(name, help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the words after ``cake``; None takes them from the process.

    Returns:
        The exit status: 0 success, 1 a trouble was found or an error of cake's own, 2 wrong usage (raised as
        SystemExit by argparse), 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in words if not word.startswith("-")), None)
    args = _parser(wanted).parse_args(words)

    from cake.core.errors import CakeError

    try:
        status = int(args._run(args))
        sys.stdout.flush()
        return status
    except (CakeError, NotImplementedError) as error:
        print(f"cake: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone: point stdout at nothing, so that the exit's own flush is quiet
        # too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
