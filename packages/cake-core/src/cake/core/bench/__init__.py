"""Timing an op against others in one run: what ``cake bench`` does, and what an op gives it to do it with.

An op's ``OpSpec.bench`` names a ``Bench``: its shapes, its arms and how to make their inputs. The rest is
here.
"""

from cake.core.bench._chart import chart
from cake.core.bench._compare import comparison, differences
from cake.core.bench._meter import CpuMeter, CudaMeter, Meter, meter
from cake.core.bench._model import (
    CEILINGS,
    PASSES,
    Arm,
    Bench,
    Ceilings,
    Inputs,
    Pass,
    Shape,
    Work,
)
from cake.core.bench._ranks import joined, run_ranks, say_step
from cake.core.bench._report import document, git_commit, header, table, write_json
from cake.core.bench._runner import Plan, Results, Runner
from cake.core.bench._spread import SpreadRunner, fla_context
from cake.core.bench._turns import run_in_turn, wait_for_turn

__all__ = [
    "CEILINGS",
    "PASSES",
    "Arm",
    "Bench",
    "Ceilings",
    "CpuMeter",
    "CudaMeter",
    "Inputs",
    "Meter",
    "Pass",
    "Plan",
    "Results",
    "Runner",
    "Shape",
    "SpreadRunner",
    "Work",
    "chart",
    "comparison",
    "differences",
    "document",
    "fla_context",
    "git_commit",
    "header",
    "joined",
    "meter",
    "run_in_turn",
    "run_ranks",
    "say_step",
    "table",
    "wait_for_turn",
    "write_json",
]
