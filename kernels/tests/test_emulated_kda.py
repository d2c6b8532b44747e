"""The kernels of cake-kda, run by the emulator.

They give what their twins give, and the same bits under every schedule.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch.nn.functional import softplus

from cake.core import sequences
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _cuda
from cake.kda import _torch as twins
from cake.kda._stages import Gate

SCALE = 128**-0.5
SEEDS = (0, 1, 2, 4)
GRADS = ("dq", "dk", "dv", "dbeta", "dg", "partials")


@pytest.fixture
def kernels(emulate):
    return emulate(_cuda)


def case_of(lengths, heads, *, gate="ordinary", g_dtype=torch.float32, edge=True, beta=None, l2norm=True):
    """Random arguments of the stages by name; `beta`: its only values."""
    random = torch.Generator().manual_seed(len(lengths))
    (h, hv), tokens, n = heads, sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    noise, uniform = normal(1, tokens, hv, 128), torch.rand(1, tokens, hv, generator=random)
    length = 1.0 if l2norm else 128**-0.5
    made = None
    if gate == "ordinary":
        g = -softplus(noise)
    elif gate == "mixed":  # no, ordinary and total decay side by side
        g = torch.where(noise > 0.7, 0.0, torch.where(noise < -0.7, -1000.0, -softplus(noise)))
    else:
        g, a_log, bias = noise, 0.5 * normal(hv), normal(hv, 128)
        made = Gate(a_log, bias, -5.0) if gate == "bounded" else Gate(a_log, bias.bfloat16(), None)
    return {
        "q": (length * normal(1, tokens, h, 128)).bfloat16(),
        "k": (length * normal(1, tokens, h, 128)).bfloat16(),
        "v": normal(1, tokens, hv, 128).bfloat16(),
        "g": g.to(g_dtype),
        "gate": made,
        "beta": uniform if beta is None else torch.tensor(beta)[(uniform * len(beta)).long()],
        "do": normal(1, tokens, hv, 128).bfloat16(),
        "state": 0.1 * normal(n, hv, 128, 128) if edge else None,
        "dstate": 0.02 * normal(n, hv, 128, 128) if edge else None,
        "seqs": sequences.packed((0, *torch.tensor(lengths).cumsum(0).tolist()), tokens),
        "l2norm": l2norm,
    }


def run_all(run, *, q, k, v, g, gate, beta, do, state, dstate, seqs, l2norm):
    """Every stage's results; a `Prep` as it is."""
    with poisoned_empty():
        prep = run.prep(q, k, g, gate, beta, seqs, scale=SCALE, l2norm=l2norm)
        o, final, states = run.scan(
            v, beta, prep, seqs, initial_state=state, output_final_state=True, save_states=True
        )
        y, adjoints, initial = run.adj(do, beta, prep, seqs, dht=dstate, need_dh0=True)
        made = {
            "o": o,
            "final": final,
            "states": states,
            "y": y.clone(),
            "adjoints": adjoints,
            "dh0": initial,
        }
        grads = run.out(
            q, k, v, g, gate, do, y, beta, prep, states, adjoints, seqs, scale=SCALE, l2norm=l2norm,
            states_edge=state is not None, adj_edge=dstate is not None,
        )  # fmt: skip
        made |= dict(zip(GRADS, grads, strict=True))
        if gate is None:
            del made["partials"]
        else:
            made["da_log"], made["dbias"] = run.reduce(made["partials"])
    return prep, made


def tensors_of(prep):
    return {f.name: x for f in fields(prep) if f.name != "plan" and (x := getattr(prep, f.name)) is not None}


CASES = {
    "one chunk": {"lengths": (64,), "heads": (1, 1)},
    "ragged": {"lengths": (70, 0, 3, 129), "heads": (1, 2)},
    "no states": {"lengths": (130, 70), "heads": (1, 3), "edge": False},
    "no norm, bf16": {"lengths": (150,), "heads": (2, 2), "l2norm": False, "g_dtype": torch.bfloat16},
    "beta 0 and 1": {"lengths": (70, 64), "heads": (1, 2), "beta": (0.0, 1.0)},
    "mixed decay": {"lengths": (150,), "heads": (1, 2), "gate": "mixed"},
    "bounded gate": {"lengths": (150,), "heads": (1, 2), "gate": "bounded", "g_dtype": torch.bfloat16},
    "standard gate": {"lengths": (150,), "heads": (1, 2), "gate": "standard"},
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_their_twins(kernels, name):
    case = case_of(**CASES[name])
    twin_prep, expected = run_all(twins, **case)
    expected |= tensors_of(twin_prep)
    first = None
    for kernels.seed in SEEDS:
        # Walks of whole heads under one schedule, in halves under the others: the same bits.
        kernels.multiprocessors = 1 if kernels.seed == 1 else 132
        prep, got = run_all(kernels, **case)
        images = got | tensors_of(prep)
        if first is not None:
            for key, value in images.items():
                assert_bitwise_equal(key, value, first[key])
            continue
        first = images
        shown = images | tensors_of(kernels.logical_prep(prep, case["seqs"]))
        for tape in ("states", "adjoints"):
            shown[tape] = kernels.logical_states(got[tape])
        if case["gate"] is not None:  # sums that cancel: of the kernels' own parts
            expected["da_log"], expected["dbias"] = twins.reduce(got["partials"])
        for key, value in expected.items():
            assert shown[key].shape == value.shape
            assert relative_error(shown[key], value) <= 5e-3, key
