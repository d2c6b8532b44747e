"""A training program as miles and Megatron write them: a launcher that parses, ranks that run both ops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAKE = "--linear-attention-backend cake"
PROGRAM = '''
"""The launcher parses and checks, then starts ranks with the arguments as JSON; each rank trains one step."""
import argparse, importlib, json, os, subprocess, sys, tempfile
from cake.core import hooks

BACKENDS = {"fla": "fla.ops", "flashqla": "flash_qla"}
RANKS = 2


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--linear-attention-backend", default="fla", choices=[*BACKENDS, "cake"])
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--lr", type=float, default=0.1)
    hooks.add_arguments(parser)
    return parser.parse_args(argv)


def launch(args):
    hooks.validate_args(args)
    assert "torch" not in sys.modules  # a launcher needs none
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), folder, json.dumps(vars(args))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            print(rank.communicate()[0].strip())
            assert rank.returncode == 0


def function(op, name):
    module, _, attribute = hooks.SOURCES[op][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def work(rank, folder, args):
    hooks.configure(args)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)  # each rank has its own data
    seen = {"lr": args.lr}
    for op, name, channels in (("gdn", "chunk_gated_delta_rule", ()), ("kda", "chunk_kda", (128,))):
        weight = torch.ones(128, requires_grad=True)
        qkv = torch.randn(1, 70, 4 * 128).bfloat16()
        q, k, v = qkv.split([128, 128, 256], dim=-1)
        q, k, v = (x.view(1, 70, -1, 128) for x in ((q * weight.bfloat16()), k, v))
        g, beta = -torch.rand(1, 70, 2, *channels), torch.rand(1, 70, 2)
        o, _ = function(op, name)(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, 30, 70])
        )
        o.float().square().mean().backward()
        dist.all_reduce(weight.grad)
        route = importlib.import_module(f"cake.{op}").last_route()
        again = route.recompute_state if op == "gdn" else route.tape == "inputs"
        seen[op] = [route.variant, again]
        seen[f"{op} grad"] = weight.grad.double().sum().item()
    from cake.core import config

    seen["pool"] = config.pool_bytes()
    hooks.release()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        work(int(sys.argv[2]), sys.argv[3], argparse.Namespace(**json.loads(sys.argv[4])))
    else:
        launch(parse(sys.argv[1:]))
'''


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def ranks(folder: Path, line: str) -> list[dict[str, Any]]:
    done = run(folder, *line.split())
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_every_rank_runs_what_the_launcher_resolved(tmp_path: Path) -> None:
    line = "--linear-attention-backend cake --lr 0.5 --cake-gdn-recompute-state"
    line += " --cake-workspace-pool-bytes 1MiB"
    first, second = ranks(tmp_path, line)
    assert first == second  # the gradients too: they were summed over ranks
    assert (first["gdn"], first["kda"]) == (["fast", True], ["fast", False])
    assert (first["lr"], first["pool"]) == (0.5, 1 << 20)


def test_the_deterministic_mode_is_seen_in_every_rank(tmp_path: Path) -> None:
    line = "--linear-attention-backend cake --deterministic-mode --cake-kda-variant det"
    first, second = ranks(tmp_path, line)
    assert first == second
    assert first["gdn"][0] == first["kda"][0] == "det"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{CAKE} --deterministic-mode --cake-gdn-variant fast", "deterministic mode is on"),
        ("--cake-kda-variant det", f"--cake-kda-variant needs op 'kda', which {CAKE} selects"),
    ],
)
def test_contradictions_stop_the_launcher(tmp_path: Path, line: str, message: str) -> None:
    done = run(tmp_path, *line.split())
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stdout == ""
