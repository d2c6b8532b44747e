"""`cake verify`: whether the kernels are right on this machine, and repeat bit for bit."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cake.core.verify import Verify

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake verify``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="prove on this machine that ops are accurate and repeat bit for bit",
        description="Compare an op's results and gradients with the recurrence in FP64, token by token, and "
        "the bits of calls that must agree: on this machine's GPU, or the reference backend on its CPU. Exit "
        "status 1 if a gate fails. Takes less than two minutes an op.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="which ops; all that are installed if none")
    parser.add_argument("--device", help="default: the GPU if there is one, else cpu")
    parser.add_argument(
        "--cases", metavar="NAMES", default="", help="of the op, ',' between them; default: all"
    )
    parser.add_argument("--variants", metavar="NAMES", default="", help="default: all that the op has")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON")
    parser.add_argument("--list", action="store_true", help="list the cases, and stop")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the gates, print the table; 1 where one failed."""
    from cake.core import registry
    from cake.core.cli._device import device_of
    from cake.core.cli._output import check_file
    from cake.core.errors import ConfigError

    specs = [registry.op_spec(name) for name in args.ops] or [
        s for s in registry.ops() if s.verify is not None
    ]
    for spec in specs:
        if spec.verify is None:
            raise ConfigError(f"op {spec.name!r} declares nothing to verify")
    if not specs:
        print("cake verify: no op is installed; to get one: pip install cake-gdn", file=sys.stderr)
        return 2
    parts: list[tuple[Verify, tuple[str, ...]]] = []
    try:
        check_file("--out", args.out)
        device = device_of(args.device)
        for spec in specs:
            assert spec.verify is not None
            parts.append((registry.load_target(spec.verify), _variants(args.variants, spec.variants)))
        if args.list:
            return _list([verify for verify, _ in parts])
        return _verify(args, parts, device)
    except ValueError as error:
        print(f"cake verify: {error}", file=sys.stderr)
        return 2


def _verify(
    args: argparse.Namespace, parts: list[tuple[Verify, tuple[str, ...]]], device: torch.device
) -> int:
    import torch
    from rich.console import Console

    from cake.core.bench import write_json
    from cake.core.verify import Runner, document, header, table

    names = [name.strip() for name in args.cases.split(",") if name.strip()]
    chosen = [tuple(verify.case(name) for name in names) or None for verify, _ in parts]
    head = header([verify.op for verify, _ in parts], device, args.seed)
    began = time.monotonic()
    outcomes = []
    for (verify, variants), cases in zip(parts, chosen, strict=True):
        runner = Runner(
            verify, variants, device, cases=cases, seed=args.seed, on_step=_step(verify.op, began)
        )
        outcomes += runner.run()
    if args.out is not None:
        write_json(args.out, document(head, outcomes))
    console = Console()
    wide = console if console.is_terminal else Console(width=140)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, the reference backend"
    wide.print(f"{where}: " + ", ".join(f"{k} {v}" for k, v in head["versions"].items()), highlight=False)
    wide.print(table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        title = f"{outcome.op}, {outcome.case}, {outcome.gate}, {outcome.variant}:"
        wide.print(f"{title}\n{outcome.message}", markup=False, highlight=False)
    seconds = time.monotonic() - began
    passed = len(outcomes) - len(failed)
    wide.print(f"{passed} of {len(outcomes)} gates passed in {seconds:.0f} s", highlight=False)
    return 1 if failed else 0


def _step(op: str, began: float) -> Any:
    def show(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {op}, {line}", file=sys.stderr, flush=True)

    return show


def _list(verifies: list[Verify]) -> int:
    for verify in verifies:
        for case in verify.cases:
            print(f"{verify.op}: {case.name}{' (bits too)' if case.bits else ''}")
    return 0


def _variants(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"--variants must be of {', '.join(known)}, got {name!r}")
    return names or known
