"""Gate and beta activations in the call: values, gradients, and parameters that overflow alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import softplus

from cake.core.testing import assert_bitwise_equal, relative_error
from cake.kda import _gates, chunk_kda
from cake.kda._stages import Gate

# Seven significant digits less a few for a handful of fp32 functions in a row.
FP32 = 2e-6
BOUNDS = pytest.mark.parametrize("bound", [None, -5.0, -0.5], ids="bound-{}".format)


def inputs(device, heads=3, tokens=70, seed=0):
    """raw [2, heads, tokens, 128], A_log [heads], bias [heads, 128]."""
    random = torch.Generator().manual_seed(seed)
    raw = torch.randn(2, heads, tokens, 128, generator=random).to(device)
    a_log = (0.5 + 8 * torch.rand(heads, generator=random)).log().to(device)
    return raw, a_log, torch.randn(heads, 128, generator=random).to(device)


def exact_gate(raw, a_log, bias, bound):
    """In the dtype of its arguments; a_log and bias broadcast against raw."""
    x = raw + bias
    if bound is None:
        return -a_log.exp() * softplus(x)
    return bound * (a_log.exp() * x).sigmoid()


class TestGate:
    @BOUNDS
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
    def test_values_and_gradients(self, device, bound, bias):
        raw, a_log, dt_bias = inputs(device)
        gate = Gate(a_log, dt_bias if bias else None, bound)
        leaves = [x.double().requires_grad_() for x in (raw, a_log[:, None, None].expand_as(raw))]
        shift = dt_bias[:, None].double() if bias else 0.0
        want = exact_gate(*leaves, shift, bound)
        got = _gates.log_decay(raw, gate)
        assert got.dtype == torch.float32
        assert relative_error(got, want) < FP32
        dg = torch.randn(raw.shape, generator=torch.Generator().manual_seed(1)).to(device)
        for a, b in zip(
            _gates.log_decay_backward(raw, dg, gate),
            torch.autograd.grad(want, leaves, dg.double()),
            strict=True,
        ):
            assert relative_error(a, b) < 2 * FP32

    def test_without_a_log(self, device):
        raw, a_log, bias = inputs(device)
        zero = Gate(torch.zeros_like(a_log), bias, -5.0)
        without = Gate(None, bias, -5.0)
        assert_bitwise_equal("g", _gates.log_decay(raw, without), _gates.log_decay(raw, zero))
        for a, b in zip(
            _gates.log_decay_backward(raw, raw, without),
            _gates.log_decay_backward(raw, raw, zero),
            strict=True,
        ):
            assert_bitwise_equal("gradient", a, b)

    @BOUNDS
    @pytest.mark.parametrize("a_log", [-20.0, 0.0, 4.9, 60.0, 100.0], ids="A{}".format)
    @pytest.mark.parametrize("x", [-1e30, -200.0, -20.0, 0.0, 20.0, 200.0, 1e30], ids="x{}".format)
    def test_extremes(self, device, a_log, x, bound):
        raw = torch.full((1, 3, 70, 128), x, device=device)
        gate = Gate(torch.full((3,), a_log, device=device), torch.zeros(3, 128, device=device), bound)
        g = _gates.log_decay(raw, gate)
        decay = g.exp()
        assert ((decay >= 0) & (decay <= 1)).all()
        for loss_gradient in (1.0, 1e4):
            for gradient in _gates.log_decay_backward(raw, torch.full_like(g, loss_gradient), gate):
                assert torch.isfinite(gradient).all()
        # The truth, where FP64 can hold it and the decay isn't cut at e^-88.
        exact = exact_gate(*(torch.tensor(value).double() for value in (x, a_log, 0.0)), bound)
        if exact > -80:
            torch.testing.assert_close(g[0, 0, 0, 0].double().cpu(), exact, rtol=1e-4, atol=1e-37)

    @pytest.mark.parametrize(("a_log", "bound"), [(5.0, None), (0.0, -100.0)])
    def test_beyond_88_the_gradient_is_zero(self, device, a_log, bound):
        raw = torch.tensor([5.0, 1.0, -3.0], device=device).view(1, 1, 3, 1)
        gate = Gate(torch.tensor([a_log], device=device), None, bound)
        g = _gates.log_decay(raw, gate)
        assert g[0, 0, 0, 0] == -88
        d_raw, d_log = _gates.log_decay_backward(raw, torch.ones_like(raw), gate)
        assert d_raw[0, 0, 0] == 0
        assert d_log[0, 0, 0] == 0
        assert d_raw[0, 0, 2] < 0

    def test_precomputed(self, device):
        raw = torch.tensor([0.0, -0.1, -87.0, -1000.0], device=device).view(1, 1, 4, 1)
        assert _gates.log_decay(raw, None).flatten().tolist() == pytest.approx([0.0, -0.1, -87.0, -88.0])


class TestBeta:
    @pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
    def test_values_and_gradients(self, device, twice):
        logits = 3 * inputs(device)[0][..., 0]
        logits.requires_grad_()
        exact = logits.detach().double().requires_grad_()
        got = _gates.beta_sigmoid(logits, twice)
        want = (2 if twice else 1) * exact.sigmoid()
        assert got.dtype == torch.float32
        assert relative_error(got, want) < FP32
        of_got = torch.autograd.grad(got.sum(), logits)[0]
        assert relative_error(of_got, torch.autograd.grad(want.sum(), exact)[0]) < FP32

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
        from cake.kda import _cuda

        special = torch.tensor([0.0, 17.0, 88.0, 104.0, 1e4, torch.inf], device="cuda")
        x = torch.cat([torch.randn(6000, device="cuda") * 8, special, -special]).to(dtype).view(1, -1, 4)
        logits = torch.stack([x, x], -1)[..., 0]
        d_beta, to = torch.randn(x.shape, device="cuda"), torch.empty_like(logits)
        for scale in (1.0, 2.0):
            assert_bitwise_equal("beta", _cuda.sigmoid(logits, scale), _gates.beta_forward(x, scale))
            _cuda.sigmoid_backward(d_beta, logits, scale, to)
            assert_bitwise_equal("its gradient", to, _gates.beta_backward(d_beta, x, scale))


class TestInTheCall:
    def leaves(self, make, device, dtype=torch.float32, lengths=(70, 0, 65), flat=True):
        case = make(lengths, heads=(1, 3), state=False)
        tokens = sum(lengths)
        raw, a_log, bias = inputs(device, tokens=tokens)
        tensors = {
            "q": case.q,
            "k": case.k,
            "v": case.v,
            "g": raw[0].transpose(0, 1)[None].to(dtype).contiguous(),
            "beta": raw[1, ..., 0].T[None].to(dtype).contiguous(),
            "A_log": a_log,
            "dt_bias": bias.flatten() if flat else bias,
        }
        return case, {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}

    def run(self, case, leaves, bound, **arguments):
        return chunk_kda(
            **leaves,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            lower_bound=bound,
            cu_seqlens_cpu=case.boundaries,
            **arguments,
        )

    @BOUNDS
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
    def test_accuracy(self, make, device, truth, bound, dtype, twice):
        # Both lengths end in a partial chunk, whose padded rows have a gradient through the final state.
        case, leaves = self.leaves(make, device, dtype)
        dht = 0.02 * torch.randn(3, 3, 128, 128, generator=torch.Generator().manual_seed(2))
        case = case.replace(dht=dht.to(device))
        o, final = self.run(case, leaves, bound, allow_neg_eigval=twice, output_final_state=True)
        torch.autograd.backward((o, final), (case.do, case.dht))
        exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
        each = exact["A_log"].detach()[:, None].expand_as(exact["g"]).requires_grad_()
        g = exact_gate(exact["g"], each, exact["dt_bias"].view(3, 128), bound)
        beta = (2 if twice else 1) * exact["beta"].sigmoid()
        want = truth(case.replace(g=g.detach(), beta=beta.detach()))
        torch.autograd.backward((g, beta), (want["dg"], want["dbeta"]))
        # The gradients come back in the inputs' dtypes.
        slack = 1.0 if dtype == torch.float32 else 1.3
        assert relative_error(o, want["o"]) < 5e-3 * (1.5 if twice else 1.0)
        for name in ("q", "k", "v"):
            assert relative_error(leaves[name].grad, want[f"d{name}"]) < 6e-3 * (1.5 if twice else 1.0), name
        limit = 6e-3 * slack * (1.5 if twice else 1.0)
        for name in ("g", "beta", "A_log", "dt_bias"):
            assert leaves[name].grad.dtype == leaves[name].dtype
            assert leaves[name].grad.shape == leaves[name].shape
            if name != "A_log":
                assert relative_error(leaves[name].grad, exact[name].grad) < limit, name
        # Sums of 17280 shares of both signs may be small by chance: they count as sums of random ones. They
        # are three numbers, and the errors of a chunk's tokens go together.
        total, size = each.grad.sum((0, 1, 3)), each.grad.norm()
        assert (leaves["A_log"].grad - total).norm() < 2 * limit * max(total.norm(), size)

    @BOUNDS
    def test_forward_is_that_of_the_gate_made_outside(self, make, device, bound):
        case, leaves = self.leaves(make, device)
        o, _ = self.run(case, leaves, bound)
        gate = Gate(leaves["A_log"].detach(), leaves["dt_bias"].detach().view(3, 128), bound)
        g = _gates.log_decay(leaves["g"].detach().transpose(1, 2), gate).transpose(1, 2)
        expected, _ = chunk_kda(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            g.contiguous(),
            leaves["beta"].sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens_cpu=case.boundaries,
        )
        if device.type == "cpu":
            assert_bitwise_equal("o", o, expected)
        else:
            # A kernel's exponential is its own, a step or two of fp32 from torch's: where that decides how a
            # value of o rounds, it is one step of bf16 away. That was one in 600 on an H200, 1e-4 over all.
            assert relative_error(o, expected) < 5e-4

    def test_both_shapes_of_the_bias(self, make, device):
        results = []
        for flat in (True, False):
            case, leaves = self.leaves(make, device, flat=flat)
            o, _ = self.run(case, leaves, None)
            o.backward(case.do)
            results.append((o, leaves["dt_bias"].grad.flatten(), leaves["A_log"].grad))
        for a, b in zip(*results, strict=True):
            assert_bitwise_equal("result", a, b)

    def test_safe_gate_with_its_bound_changes_no_bit(self, make, device):
        case, leaves = self.leaves(make, device)
        assert_bitwise_equal(
            "o", self.run(case, leaves, -5.0, safe_gate=True)[0], self.run(case, leaves, -5.0)[0]
        )

    def test_a_bound_needs_no_a_log(self, make, device):
        case, leaves = self.leaves(make, device)
        zero = torch.zeros_like(leaves["A_log"])
        given, _ = self.run(case, leaves | {"A_log": zero}, -5.0)
        del leaves["A_log"]
        o, _ = self.run(case, leaves, -5.0)
        assert_bitwise_equal("o", o, given)
        o.backward(case.do)
        assert leaves["dt_bias"].grad.abs().sum() > 0

    @pytest.mark.parametrize("wanted", ["g", "A_log", "dt_bias", "beta"])
    def test_one_input_alone(self, make, device, wanted):
        case, every = self.leaves(make, device)
        o, _ = self.run(case, every, None)
        o.backward(case.do)
        _, leaves = self.leaves(make, device)
        one = {name: x if name == wanted else x.detach() for name, x in leaves.items()}
        o, _ = self.run(case, one, None)
        o.backward(case.do)
        assert_bitwise_equal(wanted, one[wanted].grad, every[wanted].grad)

    @pytest.mark.parametrize("bound", [None, -5.0], ids="bound-{}".format)
    @pytest.mark.parametrize("a_log", [-20.0, 0.0, 4.9, 60.0, 100.0], ids="A{}".format)
    @pytest.mark.parametrize("x", [-200.0, 0.0, 200.0], ids="x{}".format)
    def test_extremes(self, make, device, a_log, x, bound):
        case, leaves = self.leaves(make, device, lengths=(70,))
        with torch.no_grad():
            leaves["g"].fill_(x)
            leaves["A_log"].fill_(a_log)
            leaves["dt_bias"].zero_()
        o, final = self.run(case, leaves, bound, output_final_state=True)
        (o.float().sum() + final.sum()).backward()
        for name, value in (("o", o), ("final", final), *((n, t.grad) for n, t in leaves.items())):
            assert torch.isfinite(value).all(), name

    @BOUNDS
    def test_padding_lanes_do_not_leak(self, make, device, bound):
        # The last chunk of 70 tokens has 6: the parameters' gradients are those of 70 tokens, whatever the
        # raw gate is in the next sequence, whose loss is 0, or beyond the end of memory.
        case, leaves = self.leaves(make, device, lengths=(70, 58))
        grads = []
        for tail in (0.0, 1e4, None):
            cut = {name: x.detach().clone() for name, x in leaves.items()}
            part = case
            if tail is None:
                cut = {name: x if x.dim() == 1 else x[:, :70] for name, x in cut.items()}
                part = case.replace(boundaries=(0, 70))
            else:
                cut["g"][:, 70:] = tail
            cut = {name: x.requires_grad_() for name, x in cut.items()}
            o, final = self.run(part, cut, bound, output_final_state=True)
            loss_gradient = case.do.clone()
            loss_gradient[:, 70:] = 0
            # Through the final state the padded rows get a gradient that is not theirs.
            loss = (o * loss_gradient[:, : o.shape[1]]).sum() + final[0].square().sum()
            loss.backward()
            grads.append((cut["A_log"].grad, cut["dt_bias"].grad))
        for other in grads[1:]:
            for a, b in zip(grads[0], other, strict=True):
                assert a.abs().sum() > 0
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)

    def test_parameters_of_a_call_without_tokens(self, make, device):
        case, leaves = self.leaves(make, device, lengths=(0,))
        o, final = self.run(case, leaves, None, output_final_state=True)
        (o.float().sum() + final.sum()).backward()
        for name in ("A_log", "dt_bias"):
            assert not leaves[name].grad.any()
