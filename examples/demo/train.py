"""Train a small hybrid language model through cake, show what it learned, and show that its bits repeat.

The text is the standard library's own sources; the model is in model.py. On a CPU this takes about three
minutes; on a GPU the model, the packs and the number of steps are far larger. Everything is a function of
the seed: after training, the first steps are run again from the start and must give the same losses and the
same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# cuBLAS repeats its bits only with a fixed workspace; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from data import BORDER, VOCABULARY, Pack, packs, read_sources
from model import OPS, Model, Size, continue_text
from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

import cake.core

console = Console()


@dataclass(frozen=True)
class Plan:
    """How much to train: a model, the tokens of a step, the number of steps, the highest learning rate."""

    size: Size
    tokens: int
    steps: int
    rate: float
    repeat: int  # the first steps that are run twice
    sample: int  # bytes of text to write


SMOKE = Plan(Size(64, 4, heads=1, value_heads=1, attention_heads=1), 512, 6, 2e-3, repeat=2, sample=16)
CPU = Plan(Size(192, 4, heads=1, value_heads=2, attention_heads=3), 3072, 260, 3e-3, repeat=3, sample=400)
GPU = Plan(
    Size(1024, 12, heads=4, value_heads=8, attention_heads=16), 32768, 800, 6e-4, repeat=9, sample=1200
)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    fingerprints: dict[int, str]  # step -> hash of all parameters after it
    seconds: float
    tokens: int


def rate_at(step: int, plan: Plan) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm = max(1, min(plan.steps // 5, 30))
    if step < warm:
        return plan.rate * (step + 1) / warm
    along = (step - warm) / max(1, plan.steps - warm)
    return plan.rate * (0.55 + 0.45 * math.cos(math.pi * along))


def fingerprint(model: Model) -> str:
    """A hash of every byte of every parameter."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def loss_of(model: Model, batch: Pack) -> torch.Tensor:
    """Mean cross entropy, nats per byte."""
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.tokens.is_cuda):
        logits = model(batch.tokens, batch.position, batch.bounds)
    return F.cross_entropy(logits, batch.targets)


def new_model(plan: Plan, op: str, device: torch.device, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(plan.size, VOCABULARY, op).to(device)


def train(
    model: Model, texts: list[bytes], plan: Plan, steps: int, seed: int, note_at: set[int], title: str
) -> Result:
    """The first `steps` steps of the plan. Nothing but the arguments decides what happens."""
    device = model.head.weight.device
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)
    losses: list[torch.Tensor] = []
    fingerprints: dict[int, str] = {}
    seen, source = 0, packs(texts, plan.tokens, seed)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f} · {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=steps, loss=math.nan, speed=0.0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, plan)
            batch = next(source).to(device)
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            seen += batch.tokens.shape[0]
            if device.type == "cpu" or step % 10 == 9 or step + 1 == steps:  # reading it waits for the GPU
                speed = seen / (time.perf_counter() - started)
                progress.update(task, completed=step + 1, loss=loss.item(), speed=speed)
                if not console.is_terminal and (step + 1) % max(1, steps // 10) == 0:
                    progress.print(
                        f"{title} {step + 1}/{steps}: loss {loss.item():.3f}, {speed:,.0f} tokens/s"
                    )
            if step + 1 in note_at:
                fingerprints[step + 1] = fingerprint(model)
    return Result([x.item() for x in losses], fingerprints, time.perf_counter() - started, seen)


@torch.no_grad()
def held_out_loss(model: Model, texts: list[bytes], plan: Plan) -> float:
    """Nats per byte on files that training never saw: the first of them, at most eight packs."""
    device, seen, total = model.head.weight.device, 0, 0.0
    source = packs(texts, plan.tokens, seed=0)
    packs_of_all = max(1, sum(len(text) + 1 for text in texts) // plan.tokens)
    for batch in itertools.islice(source, min(8, packs_of_all)):
        total += loss_of(model, batch.to(device)).item() * batch.tokens.shape[0]
        seen += batch.tokens.shape[0]
    return total / seen


def smooth(values: list[float], reach: float = 0.9) -> list[float]:
    """A running mean that forgets, without its bias towards the start."""
    result, mean = [], 0.0
    for i, value in enumerate(values):
        mean = reach * mean + (1 - reach) * value
        result.append(mean / (1 - reach ** (i + 1)))
    return result


def draw(losses: list[float], held_out: float, op: str, out: Path) -> None:
    """The loss curve: in the terminal, and as out/loss.png."""
    import plotext
    from matplotlib.figure import Figure

    steps = list(range(1, len(losses) + 1))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(console.width, 100), 16)
    plotext.plot(steps, smooth(losses), marker="braille")
    plotext.title("loss, nats per byte (smoothed)")
    plotext.xlabel("step")
    console.print(Text.from_ansi(plotext.build()))

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, smooth(losses), color="tab:blue", linewidth=2, label="smoothed")
    axes.axhline(held_out, color="tab:orange", linestyle="--", label=f"held-out files: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=f"A small language model on cake: {op}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)


def bits(value: float) -> str:
    """A float32 for reading, and its four bytes."""
    return f"{value:.6f} = {struct.pack('>f', value).hex()}"


def compare(first: Result, second: Result, repeat: int) -> bool:
    """Print the first steps of both runs side by side; whether every bit of them is equal."""
    table = Table(title=f"The first {repeat} steps, twice", title_justify="left")
    for heading in ("", "first run", "again", ""):
        table.add_column(heading)
    rows = [(f"loss, step {i + 1}", bits(first.losses[i]), bits(second.losses[i])) for i in range(repeat)]
    rows.append((f"parameters, step {repeat}", first.fingerprints[repeat], second.fingerprints[repeat]))
    for what, one, other in rows:
        table.add_row(what, one, other, "[green]same bits[/]" if one == other else "[bold red]different[/]")
    console.print(table)
    return all(one == other for _, one, other in rows)


KINDS = {
    "gdn": "the gated delta rule",
    "kda": "Kimi Delta Attention",
    "hybrid": "the gated delta rule and Kimi Delta Attention in turn",
}


def describe(model: Model, plan: Plan, op: str, device: torch.device, texts: list[bytes]) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    console.print(
        Panel(
            f"{parameters / 1e6:.1f} M parameters: {plan.size.layers} layers of width {plan.size.width},"
            f" softmax attention in every fourth, {KINDS[op]} (H={plan.size.heads},"
            f" HV={plan.size.value_heads}) in the others\n"
            f"{len(texts)} files of Python's standard library, {sum(map(len, texts)) / 1e6:.1f} MB;"
            f" {plan.steps} steps of up to {plan.tokens} bytes, whole files packed\n"
            f"{where}, torch {torch.__version__}, cake.core {cake.core.__version__}",
            title="cake demo",
        )
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small hybrid language model through cake.")
    parser.add_argument("--op", choices=OPS, default="gdn", help="the linear layers (default: gdn)")
    parser.add_argument("--steps", type=int, help="steps to train (default: what fits the device)")
    parser.add_argument(
        "--device",
        help="cpu, cuda, cuda:1, … (default: a GPU where there is one and the op has kernels for it)",
    )
    parser.add_argument("--seed", type=int, default=0, help="decides everything that is random (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder to write (default: demo-out)"
    )
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps: shows that everything runs")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def main() -> int:
    args = parse_arguments()
    # KDA runs on its reference backend, which is for CPUs.
    gpu = torch.cuda.is_available() and args.op == "gdn"
    device = torch.device(args.device or ("cuda" if gpu else "cpu"))
    plan = SMOKE if args.smoke else GPU if device.type == "cuda" else CPU
    steps = args.steps or plan.steps
    plan = Plan(plan.size, plan.tokens, steps, plan.rate, min(plan.repeat, steps), plan.sample)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)

    texts, held_out_texts = read_sources(longest=plan.tokens)
    model = new_model(plan, args.op, device, args.seed)
    describe(model, plan, args.op, device, texts)
    first = train(model, texts, plan, steps, args.seed, {plan.repeat, steps}, "training")
    held_out = held_out_loss(model, held_out_texts, plan)
    draw(first.losses, held_out, args.op, args.out)
    speed = first.tokens / first.seconds
    console.print(
        f"loss {first.losses[0]:.3f} -> {smooth(first.losses)[-1]:.3f} nats per byte;"
        f" {held_out:.3f} ({held_out / math.log(2):.2f} bits) on files it never saw; {speed:,.0f} tokens/s"
    )

    start = b"import os\n\n\ndef "
    written = continue_text(model, start, plan.sample, border=BORDER, temperature=0.7, seed=args.seed)
    console.print(Panel(Text(written.decode("utf-8", "replace")), title="what it writes", title_align="left"))
    del model

    again = train(
        new_model(plan, args.op, device, args.seed),
        texts,
        plan,
        plan.repeat,
        args.seed,
        {plan.repeat},
        "again",
    )
    same = compare(first, again, plan.repeat)

    manifest: dict[str, Any] = cake.core.manifest()
    console.print(Panel(Text(json.dumps(manifest, indent=2)), title="manifest", title_align="left"))
    report = {
        "losses": first.losses,
        "held_out": held_out,
        "tokens_per_second": speed,
        "parameters": first.fingerprints[steps],
        "same_bits": same,
        "manifest": manifest,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=2))
    (args.out / "sample.txt").write_bytes(written)
    console.print(f"in {args.out}: loss.png, sample.txt, report.json")
    if not same:
        console.print("[bold red]The repeated steps differ from the first run.[/]")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
