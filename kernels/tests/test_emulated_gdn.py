"""The kernels of cake-gdn, and the merge of maps, run by the emulator.

They give what their twins give, and the same bits under every schedule.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from cake.core import segments, sequences, state_chain
from cake.core.testing import (
    assert_bitwise_equal,
    fused_views,
    permuted_view,
    poisoned_empty,
    relative_error,
    spread_view,
)
from cake.gdn import _cuda
from cake.gdn import _torch as twins
from cake.gdn._segments import RATES as RATES_OF_GDN
from cake.kda._segments import RATES as RATES_OF_KDA

SCALE = 128**-0.5
SEEDS = (0, 1, 2, 4)
ROWS = ("q", "k", "v", "g", "beta", "do")


def beside_each_other(*like):
    """Memory for results as columns of one tensor, the last one apart: tensors of NaN, and views of them."""
    nan = [torch.full_like(x, torch.nan) for x in like]
    whole, views = fused_views(*nan[:-1], torch.full_like(nan[0][..., :2], torch.nan))
    return [whole], [*views[:-1], spread_view(nan[-1])]


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


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    do: torch.Tensor
    state: torch.Tensor | None
    dstate: torch.Tensor | None
    seqs: sequences.Sequences


def case_of(lengths, heads, *, edge=True, decay=1.0, beta=None, l2norm=True, cut=None):
    """Random inputs; `beta`: its only values, `cut`: how many segments each sequence has."""
    random = torch.Generator().manual_seed(len(lengths))
    h, hv = heads
    tokens, n = sum(lengths), len(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    length = 1.0 if l2norm else 128**-0.5
    uniform = torch.rand(1, tokens, hv, generator=random)
    seqs = sequences.packed((0, *torch.tensor(lengths).cumsum(0).tolist()), tokens)
    return Case(
        q=(length * normal(1, tokens, h, 128)).bfloat16(),
        k=(length * normal(1, tokens, h, 128)).bfloat16(),
        v=normal(1, tokens, hv, 128).bfloat16(),
        g=-decay * torch.nn.functional.softplus(normal(1, tokens, hv)),
        beta=uniform if beta is None else torch.tensor(beta)[(uniform * len(beta)).long()],
        do=normal(1, tokens, hv, 128).bfloat16(),
        state=0.1 * normal(n, hv, 128, 128) if edge else None,
        dstate=0.02 * normal(n, hv, 128, 128) if edge else None,
        seqs=seqs if cut is None else segments.cut(seqs, cut),
    )


def assert_like(expected, got, limit):
    """Relative L2 error, of zeros none at all."""
    for name, value in expected.items():
        assert got[name].shape == value.shape
        assert relative_error(got[name], value) <= limit, name


def forward(run, case, *, l2norm=True):
    """Tables, prep and scan: through the segments, if there are any."""
    prep = run.prep(case.k, case.g, case.beta, case.seqs, l2norm=l2norm)
    cut, entering, maps = isinstance(case.seqs, segments.Segments), None, None
    if cut:
        b, *maps = run.transfer(
            case.k, case.v, case.beta, prep, case.seqs, initial_state=case.state, least=-20.0
        )
        entering = run.chain(b, *maps, prep, case.seqs)
    o, final, states = run.scan(
        case.q, case.k, case.v, case.beta, prep, case.seqs, scale=SCALE, l2norm=l2norm,
        initial_state=case.state, entering=entering, output_final_state=True, save_states=True,
    )  # fmt: skip
    return prep, maps, {"o": o, "final": final, "states": states}


def backward(run, case, prep, maps, states, *, l2norm=True):
    leaving = None
    if maps is not None:
        m, live = maps
        b = run.adj_transfer(
            case.q,
            case.k,
            case.do,
            case.beta,
            prep,
            case.seqs,
            live,
            scale=SCALE,
            l2norm=l2norm,
            dht=case.dstate,
            least=-20.0,
        )
        leaving = run.chain(b, m, live, prep, case.seqs, adjoint=True)
    y, adjoints, initial, rq = run.adj(
        case.q, case.k, case.do, case.beta, prep, case.seqs, scale=SCALE, l2norm=l2norm, dht=case.dstate,
        leaving=leaving, need_dh0=True,
    )  # fmt: skip
    kept = y.clone()
    edges = [x is not None for x in (case.state, case.dstate)]
    if maps is not None:
        edges = [True, True]
    grads = run.out(
        case.q, case.k, case.v, case.do, y, case.beta, prep, states, adjoints, rq, case.seqs,
        scale=SCALE, l2norm=l2norm, states_edge=edges[0], adj_edge=edges[1],
    )  # fmt: skip
    names = ("dq", "dk", "dv", "dbeta", "dg")
    return {"y": kept, "adjoints": adjoints, "dh0": initial, "rq": rq} | dict(zip(names, grads, strict=True))


def run_all(run, case, **options):
    with poisoned_empty():
        prep, maps, results = forward(run, case, **options)
        made = {name: getattr(prep, name) for name in ("t", "b", "rk")}
        return made | results | backward(run, case, prep, maps, results["states"], **options)


CASES = {
    "one chunk": ({"lengths": (64,), "heads": (1, 1)}, {}),
    "ragged": ({"lengths": (70, 0, 3, 129), "heads": (1, 2)}, {}),
    "no states": ({"lengths": (130, 70), "heads": (1, 3), "edge": False}, {}),
    "no norm": ({"lengths": (200,), "heads": (2, 2), "l2norm": False}, {"l2norm": False}),
    "beta 0 and 1": ({"lengths": (70, 64), "heads": (2, 4), "beta": (0.0, 1.0)}, {}),
    "strong decay": ({"lengths": (150,), "heads": (1, 2), "decay": 30.0}, {}),
    "segments": ({"lengths": (200, 0, 130), "heads": (1, 2), "decay": 0.02, "cut": (3, 1, 2)}, {}),
    "segments apart": ({"lengths": (330,), "heads": (1, 1), "edge": False, "decay": 0.5, "cut": (3,)}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_their_twins(kernels, name):
    shape, options = CASES[name]
    case = case_of(**shape)
    expected = run_all(twins, case, **options)
    first = None
    for kernels.seed in SEEDS:
        got = run_all(kernels, case, **options)
        if first is None:
            first = got
            for tape in ("states", "adjoints"):
                got = got | {tape: kernels.logical_states(got[tape])}
            # Both round to bf16 at the same places; sums of fp32 in another order move a few roundings.
            assert_like(expected, got, 1e-3)
        else:
            for key, value in got.items():
                assert_bitwise_equal(key, value, first[key])


@pytest.mark.parametrize("batch", [None, 2], ids=["pack", "batch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_rows_of_any_stride(kernels, layout, batch):
    """The bits of contiguous ones, wherever they lie; and nothing is written beside them."""
    case = case_of((70, 3) if batch is None else (140,), (2, 4), beta=(0.0, 0.5, 2e-13))
    if batch is not None:
        case = in_batches(case, batch)
    q, k, v, do, beta = case.q, case.k, case.v, case.do, case.beta
    with poisoned_empty():
        prep, _, results = forward(kernels, case)
        states = results["states"]
        expected = backward(kernels, case, prep, None, states)
        wholes, into = LAYOUTS[layout](q, k, v, beta.bfloat16(), case.g)
        y, adjoints, _, rq = kernels.adj(
            q, k, do, beta, prep, case.seqs, scale=SCALE, l2norm=True, dht=case.dstate, y=into[2]
        )
        kernels.out(
            q, k, v, do, y, beta, prep, states, adjoints, rq, case.seqs, scale=SCALE,
            l2norm=True, states_edge=True, adj_edge=True, into=into,
        )  # fmt: skip
    for name, x in zip(("dq", "dk", "dv", "dbeta", "dg"), into, strict=True):
        assert_bitwise_equal(name, x, expected[name].to(x.dtype))
        x.fill_(torch.nan)
    assert all(whole.isnan().all() for whole in wholes)


def in_batches(case, batch):
    """A case of one sequence as so many rows, which have its states."""
    tokens = case.seqs.total // batch
    rows = {name: getattr(case, name).unflatten(1, (batch, tokens))[0] for name in ROWS}
    states = {name: getattr(case, name).repeat(batch, 1, 1, 1) for name in ("state", "dstate")}
    return replace(case, **rows, **states, seqs=sequences.batched(batch, tokens))


def test_a_gate_that_is_no_number_shows(kernels):
    """In its head of its document from there on, and nowhere else."""
    case = case_of((150, 70), (2, 2))
    case.g[0, 10, 1] = torch.nan
    got = run_all(kernels, case)
    for name in ("o", "dq", "dk"):
        assert got[name][0, 10:150, 1].isnan().all(), name
        assert got[name][0, :, 0].isfinite().all(), name
        assert got[name][0, 150:].isfinite().all(), name
    for name in ("final", "dh0"):
        assert got[name][0, 1].isnan().all(), name
        assert got[name][:, 0].isfinite().all(), name
        assert got[name][1].isfinite().all(), name


def test_cuts_on_the_device(kernels):
    """Boundaries that only the kernels read: the bits of the same segments planned on the host."""
    known = case_of((200, 0, 130), (1, 2), decay=0.02, cut=(2, 1, 2))
    boundaries = torch.tensor(known.seqs.whole.boundaries, dtype=torch.int64)
    unseen = segments.cut_unseen(sequences.packed_on_device(boundaries, known.seqs.total), 2)
    with poisoned_empty():
        prep, maps, results = forward(kernels, known)
        expected = results | backward(kernels, known, prep, maps, results["states"])
        for kernels.seed in SEEDS:
            case = replace(known, seqs=unseen)
            prep, maps, results = forward(kernels, case)
            got = results | backward(kernels, case, prep, maps, results["states"])
            for name in ("o", "final", "dq", "dk", "dv", "dbeta", "dg", "dh0"):
                assert_bitwise_equal(name, got[name], expected[name])


RATES = {
    "gdn": RATES_OF_GDN,
    "kda": RATES_OF_KDA,
    "walks alone": segments.Cost(transfer=0, adjoint_transfer=0, merge=0, merge_octet=0, merge_start=0),
}


@pytest.mark.parametrize("rates", RATES)
def test_cuts_that_the_device_chooses(kernels, rates):
    """Those of the planner, for every kind of pack."""
    generator = random.Random(3)
    chosen = set()
    for _ in range(60):
        n, heads = generator.randint(2, segments.CHOSEN_SEQUENCES), generator.choice((1, 4, 12, 32, 48))
        longest = generator.choice((3, 40, 700))
        chunks = [max(0, generator.randint(-1, longest)) for _ in range(n)]
        bounds = (0, *itertools.accumulate(max(0, 64 * x - generator.randrange(64)) for x in chunks))
        whole = sequences.packed(bounds, bounds[-1])
        choice = segments.choice_unseen(max(bounds[-1], 2000), n, heads, rates=RATES[rates])
        choice = choice or segments.Choice((8, 128), heads, 132, RATES[rates])
        device = sequences.packed_on_device(torch.tensor(bounds), bounds[-1])
        unseen = segments.cut_unseen(device, choice.lengths[0], choice)
        words = kernels.tables(unseen, torch.device("cpu"))
        runs = words[4 + 6 * unseen.n + 4 * unseen.chunk_capacity :].view(n + 1, 2)
        expected = choice.plan(whole.chunk_counts)
        assert tuple(runs[:, 0].diff().tolist()) == expected
        chosen.add(max(-(-count // cut) for count, cut in zip(whole.chunk_counts, expected, strict=True)))
        made = segments.cut(whole, expected)
        table = words[4 : 4 + 4 * made.n].view(-1, 4)[:, :2]
        assert table.tolist() == [[a, b - a] for a, b in itertools.pairwise(made.boundaries)]
    assert len(chosen) > 10


def test_choices_that_a_device_has_no_room_for(kernels):
    def tables(n, lengths):
        choice = segments.Choice(lengths, 1, 132, segments.COST)
        seqs = sequences.packed_on_device(64 * torch.arange(n + 1), 64 * n)
        return kernels.tables(segments.cut_unseen(seqs, 8, choice), torch.device("cpu"))

    assert tables(15, (8,))[0] == 15
    with pytest.raises(ValueError, match="of 1 to 4 lengths for at most 15 sequences, got 1 for 16"):
        tables(16, (8,))
    with pytest.raises(ValueError, match="lengths must be at least 1, got 0"):
        tables(2, (0, 8))


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("ncols", state_chain.STATE_COLUMNS, ids="C{}".format)
def test_merge(kernels, ncols, transposed):
    # The second one is long enough for every place of a map to be used again, and has steps that use none.
    long = ((4, 4, 3), (0, 0, -1), (1, 1, 4), (2, -1, -1), (3, 3, 5), (4, 2, 6), (0, 1, -1), (1, 4, 7))
    chains = (((0, -1, 1), (1, 1, 2), (2, 2, -1), (3, 3, 0)), long)
    random = torch.Generator().manual_seed(ncols)
    b = torch.randn(5, 2, 128, ncols, generator=random)
    m = torch.randn(5, 2, 128, 128, generator=random) / 12
    live = torch.randint(0, 4, (5, 2), generator=random, dtype=torch.int32)
    m[live == 0] = torch.nan  # never looked at
    expected = state_chain.merge(b, m, chains, 8, live=live, transposed=transposed)
    for kernels.seed in SEEDS:
        for columns in state_chain.COLUMNS[:: 1 if kernels.seed == SEEDS[0] else 3]:
            out = torch.full((8, 2, 128, ncols), torch.nan)
            kernels.merge(b, m, chains, 8, live=live, transposed=transposed, columns=columns, out=out)
            assert relative_error(out, expected) <= 1e-5  # 16 bits of M and of S: about 2^-18 a product
