"""The kernels of cake-kda, run by the emulator.

They give what their twins give, and the same bits under every schedule.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from cake.core import segments, sequences, state_chain
from cake.core.testing import (
    assert_bitwise_equal,
    fused_views,
    permuted_view,
    pitched_view,
    poisoned_empty,
    relative_error,
)
from cake.kda import _cuda, _gates
from cake.kda import _torch as twins
from cake.kda._stages import Gate

SCALE = 128**-0.5
SEEDS = (0, 1, 2, 4)
ROWS = ("q", "k", "v", "g", "beta", "do")
GRADS = ("dq", "dk", "dv", "dbeta", "dg", "partials")


def beside_each_other(*like):
    """Memory for results as columns of one tensor, the last one apart: tensors of NaN, and views of them."""
    nan = [torch.full_like(x, torch.nan) for x in like]
    whole, views = fused_views(*nan[:-1], torch.full_like(nan[0][..., :2], torch.nan))
    return [whole], [*views[:-1], pitched_view(nan[-1], 136)]


def permuted(order):
    def views(*like):
        made = [permuted_view(torch.full_like(x, torch.nan), order[: x.dim()]) for x in like]
        return made, made

    return views


LAYOUTS = {
    "channels": beside_each_other,
    "heads first": permuted((0, 2, 1, 3)),
    "tokens first": permuted((1, 0, 2, 3)),
}


@pytest.fixture
def kernels(emulate):
    return emulate(_cuda)


def case_of(
    lengths, heads, *, gate="ordinary", g_dtype=torch.float32, edge=True, beta=None, l2norm=True, cut=None
):
    """Random arguments of the stages by name; `beta`: its only values, `cut`: segments of each sequence."""
    random = torch.Generator().manual_seed(len(lengths))
    (h, hv), tokens, n = heads, sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    noise, uniform = normal(1, tokens, hv, 128), torch.rand(1, tokens, hv, generator=random)
    length = 1.0 if l2norm else 128**-0.5
    made = None
    if gate == "ordinary":
        g = -softplus(noise)
    elif gate == "slow":  # of the first head alone
        g = -0.002 * softplus(noise)
        g[:, :, 1:] *= 500
    elif gate == "mixed":  # no, ordinary and total decay side by side
        g = torch.where(noise > 0.7, 0.0, torch.where(noise < -0.7, -1000.0, -softplus(noise)))
    else:
        g, a_log, bias = noise, 0.5 * normal(hv), normal(hv, 128)
        made = Gate(a_log, bias, -5.0) if gate == "bounded" else Gate(a_log, bias.bfloat16(), None)
    seqs = sequences.packed((0, *torch.tensor(lengths).cumsum(0).tolist()), tokens)
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
        "seqs": seqs if cut is None else segments.cut(seqs, cut),
        "l2norm": l2norm,
    }


def run_all(run, *, q, k, v, g, gate, beta, do, state, dstate, seqs, l2norm):
    """Every stage's results, through the segments if there are any; a `Prep` as it is."""
    cut, entering, leaving = isinstance(seqs, segments.Segments), None, None
    with poisoned_empty():
        prep = run.prep(q, k, g, gate, beta, seqs, scale=SCALE, l2norm=l2norm)
        if cut:
            b, *maps = run.transfer(v, beta, prep, seqs, initial_state=state, least=-20.0)
            entering = run.chain(b, *maps, prep, seqs)
        o, final, states = run.scan(
            v, beta, prep, seqs, initial_state=state, entering=entering, output_final_state=True,
            save_states=True,
        )  # fmt: skip
        again = run.scan(
            v, beta, prep, seqs, initial_state=state, entering=entering, save_states=True, need_output=False
        )
        if cut:
            b = run.adj_transfer(do, beta, prep, seqs, maps[1], dht=dstate, least=-20.0)
            leaving = run.chain(b, *maps, prep, seqs, adjoint=True)
        y, adjoints, initial = run.adj(do, beta, prep, seqs, dht=dstate, leaving=leaving, need_dh0=True)
        made = {
            "o": o,
            "final": final,
            "states": states,
            "states again": again[2],
            "y": y.clone(),
            "adjoints": adjoints,
            "dh0": initial,
        }
        grads = run.out(
            q, k, v, g, gate, do, y, beta, prep, states, adjoints, seqs, scale=SCALE, l2norm=l2norm,
            states_edge=cut or state is not None, adj_edge=cut or dstate is not None,
        )  # fmt: skip
        made |= dict(zip(GRADS, grads, strict=True))
        if gate is None:
            del made["partials"]
        else:
            made["da_log"], made["dbias"] = run.reduce(made["partials"])
    return prep, made


def tensors_of(prep):
    return {name: x for name, x in prep._asdict().items() if name != "plan" and x is not None}


CASES = {
    "one chunk": {"lengths": (64,), "heads": (1, 1)},
    "ragged": {"lengths": (70, 0, 3, 129), "heads": (1, 2)},
    "no states": {"lengths": (130, 70), "heads": (1, 3), "edge": False},
    "no norm, bf16": {"lengths": (150,), "heads": (2, 2), "l2norm": False, "g_dtype": torch.bfloat16},
    "beta 0 and 1": {"lengths": (70, 64), "heads": (1, 2), "beta": (0.0, 1.0)},
    "mixed decay": {"lengths": (150,), "heads": (1, 2), "gate": "mixed"},
    "bounded gate": {"lengths": (150,), "heads": (1, 2), "gate": "bounded", "g_dtype": torch.bfloat16},
    "standard gate": {"lengths": (150,), "heads": (1, 2), "gate": "standard"},
    "segments": {"lengths": (200, 0, 130), "heads": (1, 2), "gate": "slow", "cut": (3, 1, 2)},
    "segments apart": {"lengths": (330,), "heads": (1, 1), "edge": False, "cut": (3,)},
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
        for tape in ("states", "states again", "adjoints"):
            shown[tape] = kernels.logical_states(got[tape])
        if case["gate"] is not None:  # sums that cancel: of the kernels' own parts
            expected["da_log"], expected["dbias"] = twins.reduce(got["partials"])
        for key, value in expected.items():
            assert shown[key].shape == value.shape
            assert relative_error(shown[key], value) <= 5e-3, key


@pytest.mark.parametrize("batch", [None, 2], ids=["pack", "batch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_rows_of_any_stride(kernels, layout, batch):
    """The bits of contiguous ones, wherever they lie; and nothing is written beside them."""
    case = case_of(
        (70, 3) if batch is None else (140,), (2, 4), gate="bounded", g_dtype=torch.bfloat16, beta=(0.0, 0.5)
    )
    if batch is not None:
        case = in_batches(case, batch)
    q, k, v, g, beta, do, seqs = (case[name] for name in ("q", "k", "v", "g", "beta", "do", "seqs"))
    prep, expected = run_all(kernels, **case)
    wholes, into = LAYOUTS[layout](q, k, v, beta.bfloat16(), g)
    y, adjoints, _ = kernels.adj(do, beta, prep, seqs, dht=case["dstate"], y=into[2])
    kernels.out(
        q, k, v, g, case["gate"], do, y, beta, prep, expected["states"], adjoints, seqs, scale=SCALE,
        l2norm=True, states_edge=True, adj_edge=True, into=into,
    )  # fmt: skip
    for name, x in zip(("dq", "dk", "dv", "dbeta", "dg"), into, strict=True):
        assert_bitwise_equal(name, x, expected[name].to(x.dtype))
        x.fill_(torch.nan)
    assert all(whole.isnan().all() for whole in wholes)


def in_batches(case, batch):
    """A case of one sequence as so many rows, which have its states."""
    tokens = case["seqs"].total // batch
    rows = {name: case[name].unflatten(1, (batch, tokens))[0] for name in ROWS}
    states = {name: case[name].repeat(batch, 1, 1, 1) for name in ("state", "dstate")}
    return case | rows | states | {"seqs": sequences.batched(batch, tokens)}


@pytest.mark.parametrize(
    ("gate", "where"),
    [("ordinary", "g"), ("bounded", "g"), ("standard", "g"), ("bounded", "A_log"), ("standard", "A_log")],
)
def test_a_gate_that_is_no_number_shows(kernels, gate, where):
    """In its head of its document from there on, or in all of A_log's head, and nowhere else."""
    case = case_of((150, 70), (2, 2), gate=gate)
    first, end = (10, 150) if where == "g" else (0, 220)
    if where == "g":
        case["g"][0, 10, 1, 5] = torch.nan
    else:
        case["gate"].a_log[1] = torch.nan
    _, got = run_all(kernels, **case)
    for name in ("o", "dq", "dk"):
        assert got[name][0, first:end, 1].isnan().all(), name
        assert got[name][0, :, 0].isfinite().all(), name
        assert got[name][0, end:].isfinite().all(), name
    for name in ("final", "dh0"):
        assert got[name][0, 1].isnan().all(), name
        assert got[name][:, 0].isfinite().all(), name


def test_cuts_on_the_device(kernels):
    """Boundaries that only the kernels read: the bits of the same segments planned on the host."""
    case = case_of((200, 0, 130), (1, 2), gate="slow", cut=(2, 1, 2))
    known = case["seqs"]
    _, expected = run_all(kernels, **case)
    boundaries = torch.tensor(known.whole.boundaries, dtype=torch.int64)
    case["seqs"] = segments.cut_unseen(sequences.packed_on_device(boundaries, known.total), 2)
    for kernels.seed in SEEDS:
        _, got = run_all(kernels, **case)
        for name in ("o", "final", "dh0", "dq", "dk", "dv", "dbeta", "dg"):
            assert_bitwise_equal(name, got[name], expected[name])


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_merge(kernels, transposed):
    chains = (((0, -1, 1), (1, 1, 2), (2, 2, 0)),)
    random = torch.Generator().manual_seed(0)
    b = torch.randn(3, 2, 128, 128, generator=random)
    m = torch.randn(3, 2, 128, 128, generator=random) / 12
    expected = state_chain.merge(b, m, chains, 3, transposed=transposed)
    assert relative_error(kernels.merge(b, m, chains, 3, transposed=transposed), expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_betas_of_logits(kernels, dtype):
    x = torch.tensor([0.0, 1e-3, 1, 8, 17, 40, 88, 104, 1e4, torch.inf])
    x = torch.cat([x, -x]).to(dtype).repeat(15)
    logits = torch.stack([x, x], -1)[:, 0].view(2, 50, 3)
    d_beta = torch.linspace(-2, 2, 300).view(2, 50, 3)
    for scale in (1.0, 2.0):
        with poisoned_empty():
            beta = kernels.sigmoid(logits, scale)
        torch.testing.assert_close(beta, _gates.beta_forward(logits, scale), rtol=3e-7, atol=1e-37)
        to = torch.full((2, 3, 50), torch.nan, dtype=dtype).mT
        kernels.sigmoid_backward(d_beta, logits, scale, to)
        expected = _gates.beta_backward(d_beta, logits, scale)
        torch.testing.assert_close(to, expected, rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=1e-37)
