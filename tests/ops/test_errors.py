"""Bad input: refused before any launch, with the argument's name, what was expected and what came."""

from __future__ import annotations

import pytest
import torch

from cake.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_launch(op, monkeypatch):
    monkeypatch.setattr(op.module("_stages"), "stages", lambda name: pytest.fail("launched"))


@pytest.fixture
def arguments(make):
    case = make((24,), heads=(2, 4))
    return {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}


@pytest.fixture
def refused(op):
    def check(arguments, error, *parts, **changes):
        with pytest.raises(error) as caught:
            op.chunk(**{**arguments, **changes})
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    return check


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("q", lambda x: x[0], ["q must be [B, T, H, K]=[any, any, any, 128]", "got [24, 2, 128]"]),
        ("q", lambda x: x[..., :64], ["q must be [B, T, H, K]", "got [1, 24, 2, 64]"]),
        ("q", lambda x: x[:, :, :0], ["q must have a row and a head", "got [B, T, H, K]=[1, 24, 0, 128]"]),
        ("k", lambda x: x[:, :23], ["k must be [B, T, H, K]=[1, 24, 2, 128]", "got [1, 23, 2, 128]"]),
        ("k", lambda x: x[:, :, :1], ["k must be [B, T, H, K]=[1, 24, 2, 128]", "got [1, 24, 1, 128]"]),
        ("v", lambda x: x[..., :64], ["v must be [B, T, HV, V]=[1, 24, any, 128]", "got [1, 24, 4, 64]"]),
        ("v", lambda x: x[:, :, :3], ["v must have a multiple of H=2 heads", "got HV=3"]),
        ("v", lambda x: x[:, :, :1], ["v must have a multiple of H=2 heads", "got HV=1"]),
        ("beta", lambda x: x[:, :, :2], ["beta must be [B, T, HV]=[1, 24, 4]", "got [1, 24, 2]"]),
        ("beta", lambda x: x[0], ["beta must be [B, T, HV]=[1, 24, 4]", "got [24, 4]"]),
        (
            "q",
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            ["q must have a contiguous last axis"],
        ),
        (
            "k",
            lambda x: x.repeat_interleave(2, -1)[..., ::2],
            ["k must have a contiguous last axis", "stride"],
        ),
        (
            "v",
            lambda x: x[..., :1].expand(-1, -1, -1, 128),
            ["v must have a contiguous last axis", "got strides"],
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_shapes_and_strides(refused, arguments, name, change, parts):
    refused(arguments, ValueError, *parts, **{name: change(arguments[name])})


@pytest.mark.parametrize(
    ("name", "dtype", "part"),
    [
        ("q", torch.float32, "q must be bfloat16, got float32"),
        ("k", torch.float16, "k must be bfloat16, got float16"),
        ("v", torch.float64, "v must be bfloat16, got float64"),
        ("g", torch.float64, "g must be float32 or bfloat16, got float64"),
        ("beta", torch.float16, "beta must be float32 or bfloat16, got float16"),
    ],
)
def test_dtypes(refused, arguments, name, dtype, part):
    refused(arguments, TypeError, part, **{name: arguments[name].to(dtype)})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_not_a_tensor(refused, arguments, name):
    refused(arguments, TypeError, f"{name} must be a torch.Tensor, got list", **{name: [1.0]})


@pytest.mark.parametrize("name", ["k", "v", "g", "beta"])
def test_devices(refused, arguments, device, name):
    meta = arguments[name].to("meta")
    refused(arguments, ValueError, f"{name} must be on {device}, got meta", **{name: meta})


def test_a_device_without_a_backend(refused, arguments):
    meta = {name: x.to("meta") for name, x in arguments.items()}
    refused(meta, NotImplementedError, "CPU and CUDA tensors", "got device meta")


class TestBoundaries:
    @pytest.mark.parametrize(
        ("bounds", "part"),
        [
            ([1, 24], "must start at 0, got 1"),
            ([0, 23], "must end at T=24, got 23"),
            ([0, 25], "must end at T=24, got 25"),
            ([0, 9, 8, 24], "must not decrease, got 9 and then 8 at index 2"),
        ],
        ids=["first", "short", "long", "decrease"],
    )
    @pytest.mark.parametrize("form", ["list", "cpu tensor", "cu_seqlens"])
    def test_values(self, refused, arguments, bounds, part, form):
        name = "cu_seqlens" if form == "cu_seqlens" else "cu_seqlens_cpu"
        value = bounds if form == "list" else torch.tensor(bounds)
        refused(arguments, ValueError, f"{name} {part}", **{name: value})

    @pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
    def test_tensors(self, refused, arguments, name):
        refused(
            arguments, ValueError, f"{name} must be [N + 1]", "got [1, 2]", **{name: torch.tensor([[0, 24]])}
        )
        for value in ([0], 0):
            x = torch.tensor(value)
            refused(arguments, ValueError, f"{name} must be [N + 1]", f"got {list(x.shape)}", **{name: x})
        for dtype in (torch.float32, torch.int16, torch.uint8):
            refused(
                arguments,
                ValueError,
                f"{name} must be int32 or int64, got",
                **{name: torch.tensor([0, 24], dtype=dtype)},
            )

    def test_lists(self, refused, arguments):
        refused(arguments, ValueError, "cu_seqlens_cpu must hold N + 1 >= 2", "got 1", cu_seqlens_cpu=[0])
        refused(arguments, ValueError, "cu_seqlens_cpu must hold ints, got float", cu_seqlens_cpu=[0.0, 24.0])
        refused(arguments, TypeError, "a CPU tensor or a list of ints, got str", cu_seqlens_cpu="0 24")
        refused(arguments, TypeError, "cu_seqlens must be a torch.Tensor, got list", cu_seqlens=[0, 24])

    def test_on_the_device(self, refused, arguments, device):
        # What is checked where values can't be read.
        cu = torch.tensor([0, 5, 24], device=device)
        refused(arguments, ValueError, "got [1, 3]", cu_seqlens=cu[None])
        refused(arguments, ValueError, "must be int32 or int64, got float32", cu_seqlens=cu.float())
        refused(arguments, ValueError, "cu_seqlens must be on", "got meta", cu_seqlens=cu.to("meta"))
        refused(arguments, ValueError, "cu_seqlens_cpu must be on the CPU", cu_seqlens_cpu=cu.to("meta"))
        if device.type == "cuda":
            strided = torch.tensor([0, 9, 5, 9, 24, 9], device=device)[::2]
            refused(arguments, ValueError, "cu_seqlens must be contiguous, got stride 2", cu_seqlens=strided)

    def test_two_forms_of_different_lengths(self, refused, arguments):
        refused(
            arguments,
            ValueError,
            "cu_seqlens must have as many values as cu_seqlens_cpu, 2, got 3",
            cu_seqlens=torch.tensor([0, 5, 24]),
            cu_seqlens_cpu=[0, 24],
        )

    def test_a_batch_is_not_packed(self, refused, make):
        case = make((24,), batch=2)
        arguments = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
        refused(arguments, ValueError, "q must be [1, T, H, 128]", "got B=2", cu_seqlens_cpu=[0, 24])


class TestStates:
    def test_shape(self, refused, arguments, device):
        for shape in ((2, 4, 128, 128), (1, 2, 128, 128), (1, 4, 64, 128), (4, 128, 128)):
            refused(
                arguments,
                ValueError,
                "initial_state must be [N, HV, K, V]=[1, 4, 128, 128]",
                f"got {list(shape)}",
                initial_state=torch.zeros(shape, device=device),
            )
        refused(
            arguments,
            ValueError,
            "initial_state must be [N, HV, V, K]=[2, 4, 128, 128], got [1, 4, 128, 128]",
            initial_state=torch.zeros(1, 4, 128, 128, device=device),
            state_v_first=True,
            cu_seqlens_cpu=[0, 24, 24],
        )

    def test_dtype_and_device(self, refused, arguments, device):
        state = torch.zeros(1, 4, 128, 128, device=device)
        refused(arguments, TypeError, "initial_state must be float32, got bf", initial_state=state.bfloat16())
        refused(arguments, ValueError, "initial_state must be on", "got meta", initial_state=state.to("meta"))

    def test_two_names_of_one_layout(self, refused, arguments):
        refused(
            arguments,
            ValueError,
            "transpose_state_layout",
            state_v_first=True,
            transpose_state_layout=True,
        )


class TestGates:
    @pytest.mark.parametrize("name", ["A_log", "dt_bias"])
    def test_parameters_without_a_gate(self, refused, arguments, device, name):
        refused(
            arguments,
            ValueError,
            f"{name} is used by use_gate_in_kernel=True",
            **{name: torch.zeros(4, device=device)},
        )

    def test_negative_eigenvalues_without_a_sigmoid(self, refused, arguments):
        refused(arguments, ValueError, "needs use_beta_sigmoid_in_kernel=True", allow_neg_eigval=True)


class TestNotServed:
    @pytest.mark.parametrize("size", [16, 32, 128, 0])
    def test_chunk_size(self, refused, arguments, size):
        refused(arguments, NotImplementedError, f"chunk_size must be 64, got {size}", chunk_size=size)

    def test_unknown_keywords(self, refused, arguments):
        refused(arguments, TypeError, "unknown", unknown=1)
        refused(arguments, TypeError, "cu_seq_lens", cu_seq_lens=[0, 24])

    def test_context(self, refused, arguments, device):
        state = torch.zeros(1, 4, 128, 128, device=device)
        refused(arguments, TypeError, "cp_context must be a KcpContext", cp_context=object())
        # A contradiction is an error whatever the context is, and whatever else is wrong.
        wrong = {"cp_context": object(), "q": None, "chunk_size": 1}
        refused(
            arguments, ValueError, "initial_state must be None under cp_context", initial_state=state, **wrong
        )
        refused(arguments, ValueError, "output_final_state must be False", output_final_state=True, **wrong)


def test_scale(refused, arguments):
    refused(arguments, TypeError, "scale must be a number, got str", scale="1")
    refused(arguments, TypeError, "scale must be a number, got Tensor", scale=torch.tensor(1.0))
    for value in (float("nan"), float("inf")):
        refused(arguments, ValueError, "scale must be finite", scale=value)


def test_variant_and_options(refused, arguments):
    refused(arguments, ConfigError, "variant", "det", "'quick'", variant="quick")
    refused(arguments, ConfigError, "recompute_state", recompute_state="maybe")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_alignment(refused, op, make):
    # A kernel loads 16 bytes at a time.
    case = make((24,), heads=(2, 4), g_dtype=torch.bfloat16)
    arguments = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    for name in ("q", "k", "v") if op.name == "gdn" else ("q", "k", "v", "g"):
        x = arguments[name]
        pitched = x.new_zeros(*x.shape[:-1], 132)[..., :128]
        shifted = x.new_zeros(x.numel() + 1)[1:].view_as(x)
        for view in (pitched, shifted):
            refused(arguments, ValueError, f"{name} must have its address and strides", "16", **{name: view})


@pytest.mark.parametrize("op", ["gdn"], indirect=True)
class TestGdn:
    @pytest.mark.parametrize(
        ("change", "got"),
        [
            (lambda x: x[:, :, :2], "[1, 24, 2]"),
            (lambda x: x[..., None].expand(-1, -1, -1, 128), "[1, 24, 4, 128]"),
        ],
        ids=["heads", "channels"],
    )
    def test_g(self, refused, arguments, change, got):
        g = change(arguments["g"])
        refused(arguments, ValueError, "g must be [B, T, HV]=[1, 24, 4]", f"got {got}", g=g)

    def test_an_architecture_without_kernels(self, op, monkeypatch):
        stages = op.module("_stages")
        monkeypatch.setattr(stages, "_capability", lambda index: (8, 0))
        with pytest.raises(NotImplementedError, match=r"sm_90 alone, got sm_80 \(cuda:1\)"):
            stages.backend_name(torch.device("cuda", 1))
        monkeypatch.setattr(stages, "_capability", lambda index: (9, 0))
        assert stages.backend_name(torch.device("cuda", 1)) == "cuda"

    def test_a_log(self, refused, arguments, device):
        gate = {"use_gate_in_kernel": True}
        a_log = torch.zeros(4, device=device)
        refused(arguments, ValueError, "A_log must be given with use_gate_in_kernel=True, got None", **gate)
        refused(arguments, ValueError, "A_log must be [HV]=[4], got [2]", A_log=a_log[:2], **gate)
        refused(
            arguments, TypeError, "A_log must be float32 or bfloat16, got int64", A_log=a_log.long(), **gate
        )
        refused(
            arguments, ValueError, "dt_bias must be [HV]=[4], got [3]", A_log=a_log, dt_bias=a_log[:3], **gate
        )
        refused(arguments, ValueError, "A_log must be on", "got meta", A_log=a_log.to("meta"), **gate)

    def test_head_first(self, refused, arguments):
        refused(arguments, NotImplementedError, "head_first", "[B, T, H, 128]", head_first=True)

    def test_chunk_indices(self, refused, arguments):
        refused(arguments, NotImplementedError, "chunk_indices", chunk_indices=torch.zeros(1, 2))


@pytest.mark.parametrize("op", ["kda"], indirect=True)
class TestKda:
    @pytest.mark.parametrize(
        ("change", "parts"),
        [
            (lambda x: x[:, :, :2], ["g must be [B, T, HV, K]=[1, 24, 4, 128]", "got [1, 24, 2, 128]"]),
            (lambda x: x[..., 0], ["g must be [B, T, HV, K]=[1, 24, 4, 128]", "got [1, 24, 4]"]),
            (lambda x: x.mT.contiguous().mT, ["g must have a contiguous last axis"]),
        ],
        ids=["heads", "no channels", "strides"],
    )
    def test_g(self, refused, arguments, change, parts):
        refused(arguments, ValueError, *parts, g=change(arguments["g"]))

    def test_a_device_without_a_backend_names_the_reference(self, refused, arguments):
        meta = {name: x.to("meta") for name, x in arguments.items()}
        refused(meta, NotImplementedError, "got device meta", "backend='torch'")

    def test_backends(self, op, monkeypatch):
        stages, cuda = op.module("_stages"), torch.device("cuda", 1)
        monkeypatch.setattr(stages, "_capability", lambda index: (8, 0))
        with pytest.raises(NotImplementedError, match=r"sm_90 alone, got sm_80 \(cuda:1\); backend='torch'"):
            stages.backend_name(cuda, None)
        assert stages.backend_name(cuda, "torch") == "torch"
        monkeypatch.setattr(stages, "_capability", lambda index: (9, 0))
        assert stages.backend_name(cuda, None) == "cuda"
        assert stages.backend_name(torch.device("cpu"), None) == "torch"
        with pytest.raises(ValueError, match="backend must be 'torch' or None, got 'cuda'"):
            stages.backend_name(cuda, "cuda")

    @pytest.mark.gpu
    @pytest.mark.parametrize("device", ["cuda"], indirect=True)
    def test_device_boundaries_for_the_reference(self, refused, arguments, device):
        # They would have to be read back.
        cu = torch.tensor([0, 5, 24], device=device)
        part = "given as cu_seqlens_cpu, for the backend 'torch'"
        refused(arguments, ValueError, part, cu_seqlens=cu, backend="torch")

    def test_parameters(self, refused, arguments, device):
        gate = {"use_gate_in_kernel": True}
        a_log, bias = torch.zeros(4, device=device), torch.zeros(512, device=device)
        refused(
            arguments,
            ValueError,
            "A_log must be given with use_gate_in_kernel=True and no lower_bound, got None",
            **gate,
        )
        refused(arguments, ValueError, "A_log must be [HV]=[4], got [2]", A_log=a_log[:2], **gate)
        refused(
            arguments, TypeError, "A_log must be float32 or bfloat16, got int64", A_log=a_log.long(), **gate
        )
        refused(arguments, ValueError, "A_log must be on", "got meta", A_log=a_log.to("meta"), **gate)
        gate["A_log"] = a_log
        for wrong, part in (
            (bias[:4], "dt_bias must be [HV * K]=[512], got [4]"),
            (bias.view(2, 256), "dt_bias must be [HV, K]=[4, 128], got [2, 256]"),
            (bias.view(1, 4, 128), "dt_bias must be [HV * K]=[512], got [1, 4, 128]"),
        ):
            refused(arguments, ValueError, part, dt_bias=wrong, **gate)
        refused(arguments, TypeError, "dt_bias must be a torch.Tensor, got list", dt_bias=[0.0], **gate)

    def test_bounds(self, refused, arguments, device):
        gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4, device=device)}
        refused(arguments, ValueError, "safe_gate=True needs a lower_bound", safe_gate=True, **gate)
        for bound in (0.0, 1.0):
            for how in (gate, {}):
                refused(arguments, ValueError, "lower_bound must be below 0", lower_bound=bound, **how)
        refused(
            arguments,
            ValueError,
            "lower_bound must be in [-5, 0) with safe_gate=True, got -5.5",
            lower_bound=-5.5,
            safe_gate=True,
            **gate,
        )
        refused(arguments, ValueError, "lower_bound must be finite", lower_bound=float("-inf"), **gate)
        refused(arguments, TypeError, "lower_bound must be a number, got str", lower_bound="-5", **gate)

    def test_intermediate_states(self, refused, arguments):
        refused(arguments, NotImplementedError, "return_intermediate_states", return_intermediate_states=True)

    def test_graphs(self, refused, arguments):
        refused(arguments, NotImplementedError, "use_graph isn't served", use_graph=True)
        refused(arguments, ValueError, "max_num_seqs is used by use_graph=True alone, got 3", max_num_seqs=3)

    def test_two_tapes(self, refused, arguments):
        both = {"recompute_state": True, "disable_recompute": True}
        refused(arguments, ValueError, "contradict each other", **both)
