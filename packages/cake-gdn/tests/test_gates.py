"""Gate and beta activations in the call: values, gradients, and parameters that overflow alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from cake.core.testing import assert_bitwise_equal, relative_error
from cake.gdn import _gates, chunk_gated_delta_rule

# Seven significant digits less a few for a handful of fp32 functions in a row.
FP32 = 2e-6


def inputs(device, heads=3, tokens=70, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    raw = torch.randn(2, tokens, heads, generator=random).to(device, dtype)
    a_log = (16 * torch.rand(heads, generator=random)).log().to(device)
    return raw, a_log, torch.randn(heads, generator=random).to(device)


class TestGate:
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
    def test_values_and_gradients(self, device, bias):
        raw, a_log, dt_bias = inputs(device)
        got_in = [raw.requires_grad_(), a_log.requires_grad_(), *([dt_bias.requires_grad_()] if bias else [])]
        want_in = [x.detach().double().requires_grad_() for x in got_in]
        got = _gates.gate(*got_in, *([] if bias else [None]))
        want = -want_in[1].exp() * softplus(sum(want_in[::2]))
        assert got.dtype == torch.float32
        assert relative_error(got, want) < FP32
        dg = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(device)
        for a, b in zip(
            torch.autograd.grad(got, got_in, dg), torch.autograd.grad(want, want_in, dg.double()), strict=True
        ):
            assert relative_error(a, b) < FP32

    @pytest.mark.parametrize("a_log", [-20.0, 0.0, 4.9, 60.0, 100.0], ids="A{}".format)
    @pytest.mark.parametrize("x", [-200.0, -100.0, -20.0, 0.0, 20.0, 200.0], ids="x{}".format)
    def test_extremes(self, device, a_log, x):
        raw = torch.full((1, 70, 3), x, device=device, requires_grad=True)
        log = torch.full((3,), a_log, device=device, requires_grad=True)
        bias = torch.zeros(3, device=device, requires_grad=True)
        g = _gates.gate(raw, log, bias)
        decay = g.exp()
        assert ((decay >= 0) & (decay <= 1)).all()
        for loss_gradient in (1.0, 1e4):
            for gradient in torch.autograd.grad(
                g, (raw, log, bias), torch.full_like(g, loss_gradient), retain_graph=True
            ):
                assert torch.isfinite(gradient).all()
        # The truth, where FP64 can hold it and the decay isn't cut at e^-88.
        exact = -torch.tensor(a_log).double().exp() * softplus(torch.tensor(x).double())
        if exact > -80:
            torch.testing.assert_close(g[0, 0, 0].double().cpu(), exact, rtol=1e-4, atol=1e-37)

    def test_beyond_88_the_gradient_is_zero(self, device):
        raw = torch.tensor([[[5.0, 1.0]]], device=device, requires_grad=True)
        log = torch.tensor([5.0, 0.0], device=device, requires_grad=True)
        g = _gates.gate(raw, log, None)
        assert g[0, 0, 0] == -88
        d_raw, d_log = torch.autograd.grad(g.sum(), (raw, log))
        assert d_raw[0, 0, 0] == 0
        assert d_log[0] == 0
        assert d_raw[0, 0, 1] < 0

    def test_gradients_have_their_inputs_dtypes(self, device):
        raw, a_log, dt_bias = inputs(device, dtype=torch.bfloat16)
        leaves = [x.requires_grad_() for x in (raw, a_log.bfloat16(), dt_bias)]
        for x, gradient in zip(leaves, torch.autograd.grad(_gates.gate(*leaves).sum(), leaves), strict=True):
            assert gradient.dtype == x.dtype
            assert gradient.shape == x.shape

    def test_only_what_is_asked_for(self, device):
        raw, a_log, dt_bias = inputs(device)
        a_log.requires_grad_()
        _gates.gate(raw, a_log, dt_bias).sum().backward()
        assert a_log.grad is not None
        assert raw.grad is None
        assert dt_bias.grad is None

    def test_sums_over_many_tokens(self, device):
        random = torch.Generator().manual_seed(3)
        x = torch.randn(1, 40001, 3, generator=random).to(device)
        assert relative_error(_gates._token_sum(x), x.double().sum((0, 1))) < 1e-5
        assert not _gates._token_sum(x[:, :0]).any()


class TestBeta:
    @pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
    def test_values_and_gradients(self, device, twice):
        logits = 3 * inputs(device)[0]
        logits.requires_grad_()
        exact = logits.detach().double().requires_grad_()
        got = _gates.beta_sigmoid(logits, twice)
        want = (2 if twice else 1) * exact.sigmoid()
        assert got.dtype == torch.float32
        assert relative_error(got, want) < FP32
        assert (
            relative_error(
                torch.autograd.grad(got.sum(), logits)[0], torch.autograd.grad(want.sum(), exact)[0]
            )
            < FP32
        )

    def test_extremes(self, device):
        logits = torch.tensor([[-200.0, -30.0, 0.0, 30.0, 200.0]], device=device, requires_grad=True)
        beta = _gates.beta_sigmoid(logits, False)
        (gradient,) = torch.autograd.grad(beta.sum(), logits)
        assert ((beta >= 0) & (beta <= 1)).all()
        assert torch.isfinite(gradient).all()
        # Digits that 1 - sigmoid(30) has lost.
        assert gradient[0, 3] > 0
        torch.testing.assert_close(gradient[0, 1], gradient[0, 3])

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_kernels_give_the_same_bits(self, dtype):
        from cake.gdn import _cuda

        special = torch.tensor([0.0, 17.0, 88.0, 104.0, 1e4, torch.inf], device="cuda")
        x = torch.cat([torch.randn(6000, device="cuda") * 8, special, -special]).to(dtype).view(1, -1, 4)
        logits = torch.stack([x, x], -1)[..., 0]
        d_beta, to = torch.randn(x.shape, device="cuda"), torch.empty_like(logits)
        for scale in (1.0, 2.0):
            assert_bitwise_equal("beta", _cuda.sigmoid(logits, scale), _gates.beta_forward(x, scale))
            _cuda.sigmoid_backward(d_beta, logits, scale, to)
            assert_bitwise_equal("its gradient", to, _gates.beta_backward(d_beta, x, scale))


class TestInTheCall:
    def leaves(self, make, device, dtype=torch.float32):
        case = make((70, 0, 65), heads=(1, 3), state=False)
        raw, a_log, dt_bias = inputs(device, tokens=135, dtype=dtype)
        logits = raw[:1].flip(1).contiguous()
        tensors = {
            "q": case.q,
            "k": case.k,
            "v": case.v,
            "g": raw[:1].contiguous(),
            "beta": logits,
            "A_log": a_log,
            "dt_bias": dt_bias,
        }
        return case, {name: x.detach().requires_grad_() for name, x in tensors.items()}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
    def test_same_bits_as_outside(self, make, device, dtype, twice):
        case, inside = self.leaves(make, device, dtype)
        _, outside = self.leaves(make, device, dtype)
        o, _ = chunk_gated_delta_rule(
            **inside,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=twice,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
        )
        expected, _ = chunk_gated_delta_rule(
            outside["q"],
            outside["k"],
            outside["v"],
            _gates.gate(outside["g"], outside["A_log"], outside["dt_bias"]),
            _gates.beta_sigmoid(outside["beta"], twice),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
        )
        assert_bitwise_equal("o", o, expected)
        o.backward(case.do)
        expected.backward(case.do)
        for name, x in inside.items():
            assert_bitwise_equal(name, x.grad, outside[name].grad)
            assert x.grad.dtype == x.dtype

    def test_accuracy(self, make, device, truth):
        case, leaves = self.leaves(make, device)
        o, _ = chunk_gated_delta_rule(
            **leaves,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
        )
        o.backward(case.do)
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        g = -exact["A_log"].exp() * softplus(exact["g"] + exact["dt_bias"])
        beta = exact["beta"].sigmoid()
        want = truth(case.replace(g=g.detach(), beta=beta.detach()))
        torch.autograd.backward((g, beta), (want["dg"], want["dbeta"]))
        assert relative_error(o, want["o"]) < 5e-3
        for name, limit in (("g", 6e-3), ("beta", 6e-3), ("A_log", 6e-3), ("dt_bias", 6e-3)):
            assert relative_error(leaves[name].grad, exact[name].grad) < limit, name

    @pytest.mark.parametrize("a_log", [-20.0, 0.0, 4.9, 60.0, 100.0], ids="A{}".format)
    @pytest.mark.parametrize("x", [-200.0, 0.0, 200.0], ids="x{}".format)
    def test_extremes(self, make, device, a_log, x):
        case, leaves = self.leaves(make, device)
        with torch.no_grad():
            leaves["g"].fill_(x)
            leaves["A_log"].fill_(a_log)
        o, final = chunk_gated_delta_rule(
            **leaves,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
            cu_seqlens_cpu=case.boundaries,
        )
        (o.float().sum() + final.sum()).backward()
        for name, value in (("o", o), ("final", final), *((n, t.grad) for n, t in leaves.items())):
            assert torch.isfinite(value).all(), name

    def test_padding_lanes_do_not_leak(self, make, device):
        # A row of a batch that is 70 tokens long: the parameters' gradients are those of its own tokens.
        case, leaves = self.leaves(make, device)
        grads = []
        for tokens in (70, 135):
            cut = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
            part = {name: x if x.dim() == 1 else x[:, :tokens] for name, x in cut.items()}
            o, _ = chunk_gated_delta_rule(**part, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
            o.backward(case.do[:, :tokens] * (torch.arange(tokens, device=device) < 70)[:, None, None])
            grads.append((cut["A_log"].grad, cut["dt_bias"].grad))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_parameter_alone_that_requires_gradients(make, device, name):
    """Nothing else does, as where all but the gate is frozen."""
    case = make((70, 30), heads=(1, 2))
    random_values = torch.Generator().manual_seed(1)
    parameters = {n: torch.randn(2, generator=random_values).to(device) for n in ("A_log", "dt_bias")}

    def gradient(*others):
        inputs = {n: x.detach().requires_grad_(n in others) for n, x in case.tensors().items()}
        given = {n: x.detach().clone().requires_grad_(n == name) for n, x in parameters.items()}
        o, _ = chunk_gated_delta_rule(
            **inputs, **given, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
        )  # fmt: skip
        return torch.autograd.grad(o, given[name], case.do)[0]

    assert_bitwise_equal(name, gradient(), gradient("q", "g"))
