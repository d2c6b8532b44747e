"""Results and gradients against the FP64 recurrence, over shapes, gates, betas and keys."""

from __future__ import annotations

import pytest
import torch

from cake.core.testing import poisoned_empty

ADVERSARIAL = 1.5
# With one key and beta = 1 each token replaces the last value, D_i = v_i - v_(i-1), and the state sums the
# roundings of up to 64 of them: 8 x 1.1e-3 x sqrt(2) = 1.2e-2 of a value, whatever the order of sums. With
# runs of 8 it is 4.4e-3 more than usual, where other kernels measure 8e-3 (o, dq, dv), 14e-3 (dg, dbeta).
REPEATED = {
    # Measured on an H200: o 1.33e-2, dv 1.89e-2 and dbeta 2.48e-2.
    "gdn": {"o": 3.0, "ht": 4.0, "dq": 3.4, "dk": 1.0, "dv": 3.5, "dg": 2.5, "dbeta": 4.5, "dh0": 1.0},
    # The state is written along k^ in bf16 and read along it, whose square is 1 to 1e-3 only: once in a
    # chunk. 4096 such tokens on an H200, where the roundings of 64 chunks come together, measure 13.6e-3 (o),
    # 20.3e-3 (ht) and 19.1e-3 (dv); cut into segments, 50.9e-3 (dbeta of the worst block, 18.8e-3 of all).
    "kda": {"o": 3.0, "ht": 5.5, "dq": 3.0, "dk": 1.0, "dv": 3.5, "dg": 2.5, "dbeta": 4.5, "dh0": 1.0},
}
REPEATED_8 = {"o": 1.6, "ht": 2.0, "dq": 1.5, "dk": 1.0, "dv": 1.5, "dg": 2.0, "dbeta": 2.0, "dh0": 1.0}


@pytest.mark.parametrize(
    "tokens", [1, 2, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 191, 193, 300], ids="T{}".format
)
def test_lengths(make, call, assert_accurate, tokens):
    case = make((tokens,), seed=tokens)
    with poisoned_empty():
        got = call(case)
    assert_accurate(case, got)


@pytest.mark.slow
def test_every_length_up_to_130_in_one_pack(op, make, call, assert_accurate):
    case = make(tuple(range(131)), heads=(1, 1), seed=3)
    # Some blocks are a single token, and its dbeta one number: the worst of them.
    assert_accurate(case, call(case), 1.0 if op.name == "gdn" else {"dbeta": 1.5})


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "device"), [("gdn", "cuda")], indirect=True)
@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize("first", range(1, 131, 10))
def test_every_length_up_to_130_alone(make, call, assert_accurate, first, state):
    for tokens in range(first, first + 10):
        case = make((tokens,), heads=(2, 8), state=state, seed=tokens)
        with poisoned_empty():
            got = call(case)
        assert_accurate(case, got)


@pytest.mark.parametrize("op", ["gdn"], indirect=True)
@pytest.mark.parametrize("gate", ["ordinary", "model"])
def test_a_sequence_of_one_token_and_one_head(make, call, assert_accurate, gate):
    # One value of dbeta stands alone: no other averages its roundings.
    case = make((130, 64, 1, 300), heads=(1, 1), gate=gate, beta_dtype=torch.bfloat16)
    assert_accurate(case, call(case))


HEADS = {
    "gdn": [(1, 1), (2, 8), (4, 12), (16, 16), (16, 32), (16, 48), (16, 64), (32, 32), (48, 48)],
    "kda": [(1, 1), (4, 4), (12, 12), (16, 16), (32, 32), (64, 64), (96, 96)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("op", "heads"), [(op, heads) for op, each in HEADS.items() for heads in each], indirect=["op"], ids=str
)
@pytest.mark.parametrize("gate", ["ordinary", "of models"])
def test_heads_of_models(op, make, call, assert_accurate, heads, gate):
    if gate == "of models":
        gate = "model" if op.name == "gdn" else "bounded"
    case = make((130, 64, 1, 300), heads=heads, gate=gate, beta_dtype=torch.bfloat16)
    assert_accurate(case, call(case))


@pytest.mark.parametrize(
    "lengths",
    [(640, 143), (128, 640), (1, 126), (63, 2), (3, 1, 2, 64, 65, 200), (64, 64), (1,) * 20, (257, 1, 31)],
    ids=str,
)
def test_ragged_packs(make, call, assert_accurate, lengths):
    case = make(lengths, heads=(1, 2), seed=1)
    with poisoned_empty():
        got = call(case)
    assert_accurate(case, got)


@pytest.mark.parametrize("tokens", [1, 64, 100], ids="T{}".format)
def test_batches(make, call, assert_accurate, tokens):
    case = make((tokens,), heads=(2, 4), batch=3)
    assert_accurate(case, call(case))


@pytest.mark.parametrize("heads", [(1, 1), (1, 3), (2, 2), (2, 8), (4, 4), (4, 12), (5, 15)], ids=str)
def test_heads(make, call, assert_accurate, heads):
    case = make((90, 40), heads=heads)
    assert_accurate(case, call(case))


@pytest.mark.parametrize("state", [True, False], ids=["state", "no-state"])
@pytest.mark.parametrize(
    "gate", ["model", "bounded", "slow", "mixed", 0.0, -0.001, -0.5, -5.0, -20.0, -40.0, -1000.0], ids=str
)
def test_gates(make, call, assert_accurate, gate, state):
    case = make((200, 70), gate=gate, state=state, seed=5)
    got = call(case)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert_accurate(case, got, ADVERSARIAL if gate in ("slow", 0.0, -0.001) else 1.0)


@pytest.mark.parametrize("beta", [0.0, 1e-12, 1e-3, 0.5, 1.0, "half ones", "zeros and ones"], ids=str)
@pytest.mark.parametrize("gate", ["ordinary", 0.0], ids="gate-{}".format)
def test_betas(make, call, assert_accurate, gate, beta):
    case = make((200,), gate=gate, beta=beta, seed=6)
    assert_accurate(case, call(case), ADVERSARIAL if gate == 0.0 else 1.0)


@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 1.0, "half ones"], ids=str)
def test_repeated_keys_without_decay(op, make, call, assert_accurate, device, beta):
    tokens = 512 if device.type == "cpu" else 4096
    case = make((tokens,), heads=(1, 1), gate=0.0, beta=beta, keys="repeated", seed=7)
    got = call(case)
    assert_accurate(case, got, REPEATED[op.name])
    # The state can't grow: with one key it holds no more than an average of values seen.
    assert got["ht"].abs().max() < 10


@pytest.mark.parametrize("beta", [0.5, 1.0, "half ones"], ids=str)
def test_keys_repeated_8_times_without_decay(make, call, assert_accurate, beta):
    case = make((500,), gate=0.0, beta=beta, keys="repeated 8 times", seed=8)
    assert_accurate(case, call(case), REPEATED_8)


def test_without_beta_nothing_is_written(make, call):
    case = make((150,), beta=0.0, gate=0.0)
    got = call(case)
    assert torch.equal(got["ht"], case.initial_state)
    assert not got["dv"].any()


def test_beta_above_one(make, call, assert_accurate):
    case = make((200,), beta="uniform")
    case = case.replace(beta=2 * case.beta)
    assert_accurate(case, call(case), ADVERSARIAL)


@pytest.mark.parametrize("scale", [None, 1.0, 0.01, -2.0], ids="scale-{}".format)
@pytest.mark.parametrize("l2norm", [True, False], ids=["norm", "plain"])
def test_norm_and_scale(op, make, call, assert_accurate, l2norm, scale):
    case = make((140,), l2norm=l2norm, scale=scale)
    got = call(case)
    size = 1.0 if scale is None else max(abs(scale) / 128**-0.5, 1.0)
    assert_accurate(case, got, least_dg=op.own.ORDINARY_DG * size)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["beta-bf16", "g-bf16"]
)
def test_gate_dtypes(make, call, assert_accurate, dtypes):
    g_dtype, beta_dtype = dtypes
    case = make((150,), g_dtype=g_dtype, beta_dtype=beta_dtype)
    got = call(case)
    assert got["dg"].dtype == g_dtype
    assert got["dbeta"].dtype == beta_dtype
    assert_accurate(case, got)


def test_rows_of_zeros_have_finite_gradients(make, call, assert_accurate):
    case = make((100,))
    q, k = case.q.clone(), case.k.clone()
    q[:, 10:20], k[:, 15:30] = 0, 0
    case = case.replace(q=q, k=k)
    got = call(case)
    assert all(torch.isfinite(x).all() for x in got.values())
    assert_accurate(case, got)


class TestGateGradient:
    """Gradients of g are differences of large sums: the first thing that a careless rounding ruins."""

    @pytest.mark.parametrize("gate", ["model", "bounded", "mixed"])
    def test_realistic_gates(self, make, call, assert_accurate, gate):
        # Judged against its own size, whatever that is.
        case = make((1024,), heads=(2, 2), gate=gate, beta_dtype=torch.bfloat16, state=False, seed=11)
        if gate == "model":
            assert case.g.min() < -30
        assert_accurate(case, call(case), {"dg": 1.6}, least_dg=0.0)

    @pytest.mark.parametrize("gate", ["ordinary", "model", "bounded", "slow", "mixed"])
    def test_first_token_without_state(self, make, call, gate):
        # The first decay meets a zero state: its gradient is 0, and all pairs of tokens must cancel in it.
        case = make((70, 300), heads=(2, 4), gate=gate, state=False, seed=12)
        dg = call(case)["dg"]
        first = dg[0, [0, 70]].abs().max()
        assert first <= 1e-4 * dg.abs().max()

    @pytest.mark.parametrize("gate", ["model", "mixed"])
    def test_zero_state_is_no_state(self, make, call, assert_same_bits, gate):
        case = make((70, 130), heads=(2, 4), gate=gate, state=False, seed=13)
        without = call(case)
        with_state = call(case.replace(initial_state=case.q.new_zeros((2, 4, 128, 128), dtype=torch.float32)))
        del with_state["dh0"]
        assert_same_bits(with_state, without)


@pytest.mark.parametrize("op", ["kda"], indirect=True)
class TestBrokenWord:
    """safe_gate is the caller's word that g is bounded: one that is broken changes no bit."""

    @pytest.mark.parametrize("gate", ["mixed", -1000.0, -20.0, "bounded"], ids=str)
    @pytest.mark.parametrize("bound", [None, -5.0, -0.5], ids=str)
    def test_same_bits(self, make, call, assert_same_bits, gate, bound):
        case = make((100, 33), gate=gate)
        assert_same_bits(call(case, safe_gate=True, lower_bound=bound), call(case))
