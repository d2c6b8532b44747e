"""`cake bench`: time an op's passes on this machine, side by side with others."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cake.core.bench import Arm, Bench, Plan, Results

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the parser of ``cake bench``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="time an op's passes on this machine",
        description="Time an op's forward and backward on this machine, side by side with other libraries. "
        "Every arm is checked against another or the truth before it is timed, and the arms take turns.",
    )
    parser.add_argument("op", help="the op, such as gdn")
    parser.add_argument(
        "--vs",
        metavar="NAMES",
        default="",
        help="others to time: fla,flashqla; all for all that are installed",
    )
    parser.add_argument("--variants", metavar="NAMES", default="", help="the op's own arms; default: all")
    parser.add_argument("--shapes", metavar="NAMES", default="", help="default: all that suit the device")
    parser.add_argument(
        "--passes", metavar="NAMES", default="", help="fwd,fwd_train,bwd,fwd+bwd; default: all"
    )
    parser.add_argument("--modes", metavar="NAMES", default="", help="of the op's own arms; default: all")
    parser.add_argument("--device", help="default: the GPU if there is one, else cpu")
    parser.add_argument("--samples", type=_positive, default=15, help="timed samples per pass (default: 15)")
    parser.add_argument("--warmups", type=_count, default=5, help="untimed samples before them (default: 5)")
    parser.add_argument("--profiles", type=_count, default=3, help="profiled runs per pass (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument(
        "--compile-jobs",
        type=_count,
        metavar="N",
        default=0,
        help="compile and check in up to N processes, one per head count, then time them in turn: "
        "for others that compile for minutes when first called",
    )
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="spread each pack over N ranks, one per GPU (NCCL; gloo on a CPU), and time one rank beside",
    )
    parser.add_argument(
        "--layouts",
        metavar="NAMES",
        default="contiguous,zigzag",
        help="of the packs over ranks (default: contiguous,zigzag)",
    )
    parser.add_argument("--rank", type=_count, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="begin nothing new after this long"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, rewritten after every shape")
    parser.add_argument(
        "--keep", action="store_true", help="keep the shapes that FILE holds and this run doesn't measure"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw bars and the floor (needs matplotlib)")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD", help="print the times beside those of a JSON of an earlier run"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="show the results of a JSON; measure nothing"
    )
    parser.add_argument("--commit", help="recorded where the sources are no git checkout")
    parser.add_argument("--list", action="store_true", help="list the op's shapes and arms, and stop")
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and write the JSON; 1 where an arm of the op failed or two arms disagreed."""
    from cake.core import registry
    from cake.core.cli._device import device_of
    from cake.core.cli._output import check_file, read_results
    from cake.core.errors import ConfigError

    spec = registry.op_spec(args.op)
    if spec.bench is None:
        raise ConfigError(f"op {args.op!r} declares no bench")
    bench: Bench = registry.load_target(spec.bench)
    if args.list:
        return _list(bench)
    if args.png is not None and find_spec("matplotlib") is None:  # before anything is measured
        from cake.core.bench._chart import MISSING

        print(f"cake bench: {MISSING}", file=sys.stderr)
        return 2
    try:
        for option, path in (("--out", args.out), ("--png", args.png)):
            check_file(option, path)
        if args.keep and args.out is None:
            raise ValueError("--keep needs --out, the file whose shapes are kept")
        old, source = read_results(args.compare, bench.op), read_results(args.source, bench.op)
        earlier = read_results(args.out, bench.op) if args.keep and args.out.exists() else None
        if source is not None:
            return _show(args, source, old)
        device = device_of(args.device if args.rank is None else _device_of_rank(args))
        plan = _plan(args, bench, device)
        if args.world_size is not None:
            _check_ranks(args, device)
    except ValueError as error:
        print(f"cake bench: {error}", file=sys.stderr)
        return 2
    if args.rank is not None:
        return _measure_rank(args, bench, plan, device)
    return _measure(args, bench, plan, device, old, earlier)


def _show(
    args: argparse.Namespace,
    found: dict[str, Any],
    old: dict[str, Any] | None,
    run: Results | None = None,
) -> int:
    """The table of this run, or of a whole document; then comparison and picture, as far as asked for."""
    from rich.console import Console

    from cake.core.bench import Results, chart, differences, table

    console = Console()
    # Wide enough for every column when the output is a file or a log.
    wide = console if console.is_terminal else Console(width=200)
    head = found["header"]
    versions = {"driver": head["driver"], **head["versions"]}
    name = head["gpu"] or "cpu"
    wide.print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in versions.items() if v is not None))
    results = Results(rows=found["rows"], notes=found["notes"]) if run is None else run
    wide.print(table(results))
    if old is not None:
        wide.print(differences(old, found))
    for note in results.notes:
        wide.print(f"note: {note}", markup=False)
    if args.png is not None:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        chart(found, args.png)
        wide.print(f"written: {args.png}", markup=False)
    return 0


def _measure(
    args: argparse.Namespace,
    bench: Bench,
    plan: Plan,
    device: torch.device,
    old: dict[str, Any] | None,
    earlier: dict[str, Any] | None,
) -> int:
    import torch

    from cake.core.bench import (
        CEILINGS,
        Runner,
        document,
        header,
        meter,
        run_in_turn,
        run_ranks,
        write_json,
    )

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    head = header(bench, plan, device, args.commit)
    ceilings = next((found for gpu, found in CEILINGS.items() if name.startswith(gpu)), None)

    def save(results: Results) -> None:
        if args.out is not None:
            write_json(args.out, document(head, results, earlier))

    if args.world_size is not None:
        head |= {"world_size": args.world_size, "layouts": _layouts(args)}
        head["method"]["ranks"] = (
            "rows with world_size > 1: all ranks start together, a sample is the slowest rank's, and gpu_ms "
            "counts the collectives' kernels too, which wait for other ranks"
        )
        with _progress(len(plan.shapes) * _steps_of_ranks(args, plan)) as step:
            results = run_ranks(
                [*_words(args, device), "--layouts", args.layouts, *_shapes_and_budget(args, plan)],
                args.world_size,
                seconds=plan.time_budget,
                on_step=step,
            )
    elif args.compile_jobs:
        with _progress(2 * len(plan.shapes)) as step:
            results = run_in_turn(
                _words(args, device),
                plan.shapes,
                processes=args.compile_jobs,
                seconds=plan.time_budget,
                on_step=step,
                on_shapes=save,
            )
    else:
        if args.in_turn:
            plan = _wait(bench, plan, device)
        with _progress(plan.steps) as step:
            runner = Runner(
                bench, plan, device, meter(device), ceilings=ceilings, on_step=step, on_shape=save
            )
            results = runner.run()
    save(results)
    _show(args, document(head, results, earlier), old, results)
    if args.out is not None:
        print(f"written: {args.out}")
    return 1 if results.failed else 0


def _measure_rank(args: argparse.Namespace, bench: Bench, plan: Plan, device: torch.device) -> int:
    """One rank of a run over several; rank 0 writes what was found."""
    import torch

    from cake.core.bench import SpreadRunner, document, joined, say_step, write_json

    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // args.world_size))

    def save(results: Results) -> None:
        if args.rank == 0:
            write_json(args.out, document({}, results))

    with joined(args.rank, args.world_size, args.meet, device.type):
        runner = SpreadRunner(bench, plan, _layouts(args), device, on_step=say_step, on_shape=save)
        results = runner.run()
    save(results)
    return 1 if results.failed else 0


def _device_of_rank(args: argparse.Namespace) -> str:
    name: str = args.device
    return f"cuda:{args.rank}" if name.startswith("cuda") else name


def _check_ranks(args: argparse.Namespace, device: torch.device) -> None:
    """Refuse what can't be spread over ranks.

    Raises:
        ValueError: too few GPUs, an unknown layout, or options that don't go together.
    """
    import torch

    if args.compile_jobs or args.in_turn:
        raise ValueError("--world-size can't be used with --compile-jobs")
    _layouts(args)
    if device.type == "cuda" and torch.cuda.device_count() < args.world_size:
        raise ValueError(
            f"--world-size {args.world_size} needs {args.world_size} CUDA GPUs, one for each rank, found "
            f"{torch.cuda.device_count()}; --device cpu runs the ranks on the CPU"
        )


def _layouts(args: argparse.Namespace) -> list[str]:
    from cake.core.cp import LAYOUTS

    return _chosen("--layouts", args.layouts, list(LAYOUTS))


def _steps_of_ranks(args: argparse.Namespace, plan: Plan) -> int:
    layouts = len(_layouts(args))
    return (1 + layouts) * (len(plan.entries) + len(plan.passes))


def _shapes_and_budget(args: argparse.Namespace, plan: Plan) -> list[str]:
    shapes = ["--shapes", ",".join(shape.name for shape in plan.shapes)]
    return shapes if args.time_budget is None else [*shapes, "--time-budget", str(args.time_budget)]


def _words(args: argparse.Namespace, device: torch.device) -> list[str]:
    """The command that another process runs for some of the shapes."""
    values = {
        "--vs": args.vs,
        "--variants": args.variants,
        "--passes": args.passes,
        "--modes": args.modes,
        "--device": device,
        "--samples": args.samples,
        "--warmups": args.warmups,
        "--profiles": args.profiles,
        "--seed": args.seed,
        "--commit": args.commit,
    }
    given = [(name, str(value)) for name, value in values.items() if value not in ("", None)]
    return ["bench", args.op, *(word for pair in given for word in pair)]


def _wait(bench: Bench, plan: Plan, device: torch.device) -> Plan:
    """Run everything once, untimed, so that all is compiled; then wait for the turn."""
    from cake.core.bench import Runner, meter, wait_for_turn

    untimed = replace(plan, passes=("fwd", "fwd+bwd"), samples=1, warmups=0, profiles=0)
    Runner(bench, untimed, device, meter(device)).run()
    return replace(plan, time_budget=wait_for_turn())


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A function that shows the step that begins: in a progress bar, or as lines without a terminal."""
    if not sys.stderr.isatty():
        start = time.monotonic()
        yield lambda line: print(f"{time.monotonic() - start:6.0f} s  {line}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps)
        done = -1

        def step(line: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=line)

        yield step
        progress.update(task, completed=done + 1)


def _plan(args: argparse.Namespace, bench: Bench, device: torch.device) -> Plan:
    """What the arguments ask for.

    Raises:
        ValueError: An unknown name; the message lists the known ones.
    """
    from cake.core.bench import PASSES, Plan

    peers = [arm for arm in bench.arms if arm.peer]
    own = [arm for arm in bench.arms if not arm.peer]
    modes = _chosen("--modes", args.modes, list(dict.fromkeys(str(m) for arm in own for m in arm.modes)))
    arms = [
        _with_modes(arm, modes)
        for arm in own
        if arm.name in _chosen("--variants", args.variants, [a.name for a in own])
    ]
    names = "" if args.vs == "all" else args.vs
    wanted = _chosen("--vs", names, [arm.name for arm in peers]) if args.vs else []
    spread = args.world_size is not None
    named = [bench.shape(name) for name in _names(args.shapes)]
    shapes = named or list(bench.default_shapes(device.type, spread=spread))
    return Plan(
        shapes=tuple(shapes),
        arms=(*arms, *(arm for arm in peers if arm.name in wanted)),
        passes=tuple(p for p in PASSES if p in _chosen("--passes", args.passes, list(PASSES))),
        samples=args.samples,
        warmups=args.warmups,
        profiles=args.profiles,
        seed=args.seed,
        time_budget=args.time_budget,
    )


def _with_modes(arm: Arm, modes: list[str]) -> Arm:
    return replace(arm, modes=tuple(mode for mode in arm.modes if str(mode) in modes))


def _list(bench: Bench) -> int:
    for shape in bench.shapes:
        print(shape)
    print(f"arms: {', '.join(arm.name for arm in bench.arms)}")
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen(option: str, text: str, known: list[str]) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in known:
            raise ValueError(f"{option} must be of {', '.join(known)}, got {name!r}")
    return names or known


def _count(text: str, least: int = 0) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
    return value


def _positive(text: str) -> int:
    return _count(text, 1)
