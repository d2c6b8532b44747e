"""The output kernel and the sums of its gate gradients, beside their twins on the same tapes."""

from __future__ import annotations

import pytest
import torch

from cake.core import sequences
from cake.core.testing import assert_bitwise_equal, poisoned_empty, relative_error
from cake.kda import _torch
from cake.kda._stages import Gate, stages

pytestmark = pytest.mark.gpu("sm_90a")

SCALE = 128**-0.5
LENGTHS = (130, 1, 63, 200)
NAMES = ("dq", "dk", "dv", "dbeta", "dg", "partials")
# Both round what they feed to products, by different factors: each is within half of this of the truth.
LIMITS = {"dq": 5e-3, "dk": 5e-3, "dv": 0.0, "dbeta": 4e-3, "dg": 7e-3, "partials": 1.5e-2}


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.fixture
def run(device):
    """Gradients by name, from the kernel or from the twin, of the tapes that the kernels made."""

    def run_out(case, gate=None, *, kernel=True, ctas=None, on_device=False):
        cuda = stages("cuda")
        total, edge = case.boundaries[-1], case.initial_state is not None
        seqs = sequences.packed(case.boundaries, total)
        given = seqs
        if on_device:
            given = sequences.packed_on_device(torch.tensor(case.boundaries, device=device), total)
        how = {"scale": SCALE, "l2norm": case.l2norm}
        with pytest.MonkeyPatch.context() as patch, poisoned_empty():
            if ctas is not None:
                patch.setattr(cuda, "_ctas", lambda index: ctas)
            prep = cuda.prep(case.q, case.k, case.g, gate, case.beta, given, **how)
            _, _, tape = cuda.scan(
                case.v, case.beta, prep, given, initial_state=case.initial_state, save_states=True
            )
            y, adj_tape, _ = cuda.adj(case.do, case.beta, prep, given, dht=case.dht)
            out = cuda.out
            if not kernel:
                out = _torch.out
                prep = cuda.logical_prep(prep, seqs)
                tape, adj_tape = cuda.logical_states(tape), cuda.logical_states(adj_tape)
            results = out(
                case.q, case.k, case.v, case.g, gate, case.do, y, case.beta, prep, tape, adj_tape,
                given if kernel else seqs, states_edge=edge, adj_edge=edge, **how,
            )  # fmt: skip
        return {name: x for name, x in zip(NAMES, results, strict=True) if x is not None}

    return run_out


def gate_of(kind, v_heads, device):
    random = torch.Generator().manual_seed(3)
    a_log = (0.5 + 3 * torch.rand(v_heads, generator=random)).log().to(device)
    bias = torch.randn(v_heads, 128, generator=random).to(device)
    return Gate(a_log, bias.bfloat16(), None) if kind == "standard" else Gate(a_log, bias, -5.0)


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 3)], ids=str)
@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["ordinary", "slow", "mixed", -5.0, -13.0, -1000.0], ids=str)
def test_against_the_twin(make, run, gate, g_dtype, heads):
    case = make(LENGTHS, heads=heads, gate=gate, g_dtype=g_dtype, state=heads[0] == 2, seed=1)
    got, want = run(case), run(case, kernel=False)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        error = (got[name].double() - x.double()).norm()
        # Under total decay the true dg is next to nothing.
        assert error <= LIMITS[name] * x.double().norm() + 1e-7, name


@pytest.mark.parametrize("beta", ["zeros and ones", "half ones", 1e-12])
def test_against_the_twin_where_beta_is_at_its_ends(make, run, beta):
    case = make(LENGTHS, heads=(1, 2), beta=beta, seed=2)
    want = run(case, kernel=False)
    for name, x in run(case).items():
        assert relative_error(x, want[name].double()) <= LIMITS[name], name


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("l2norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("kind", ["standard", "bounded"])
def test_gates_against_the_twin(make, run, kind, l2norm, g_dtype, device):
    case = make(LENGTHS, heads=(1, 2), l2norm=l2norm, seed=3)
    raw = torch.randn(case.g.shape, generator=torch.Generator().manual_seed(4)).to(device, g_dtype)
    case, gate = case.replace(g=raw), gate_of(kind, 2, device)
    got, want = run(case, gate), run(case, gate, kernel=False)
    for name, x in want.items():
        assert relative_error(got[name], x.double()) <= LIMITS[name], name
    sums = stages("cuda").reduce(got["partials"])
    exact = got["partials"].double().sum(0)
    assert relative_error(torch.cat([sums[0][:, None], sums[1]], 1), exact) < 1e-6


@pytest.mark.parametrize("ctas", [1, 3, 7])
def test_any_number_of_ctas_gives_the_same_bits(make, run, ctas, device):
    case, gate = make(LENGTHS, heads=(2, 4), seed=5), gate_of("bounded", 4, device)
    want = run(case, gate)
    for name, x in run(case, gate, ctas=ctas).items():
        assert_bitwise_equal(name, x, want[name])


def test_rows_of_chunks_that_do_not_exist_are_zero(make, run, device):
    case, gate = make(LENGTHS, heads=(1, 2), seed=6), gate_of("bounded", 2, device)
    want, got = run(case, gate), run(case, gate, on_device=True)
    chunks = want["partials"].shape[0]
    assert got["partials"].shape[0] > chunks
    assert not got["partials"][chunks:].any()
    assert_bitwise_equal("partials", got["partials"][:chunks].contiguous(), want["partials"])
    for whole, x in zip(
        stages("cuda").reduce(got["partials"]), stages("cuda").reduce(want["partials"]), strict=True
    ):
        assert_bitwise_equal("sums", whole, x)
