"""Small random models of transformers train with cake, through the function of FLA's that they call.

Needs transformers and flash-linear-attention: `nox -s frameworks` installs both.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fla")

import torch

from cake.core import config, fla
from cake.core.testing import assert_bitwise_equal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 20
COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "use_cache": False,
}
GDN = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
#: package of transformers.models: configuration, model, the function it calls, the op, what makes it
MODELS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "torch_chunk_gated_delta_rule",
        "gdn",
        {**GDN, **EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", "torch_chunk_gated_delta_rule", "gdn", GDN),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        "chunk_kimi_delta_attention",
        "kda",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "linear_num_heads": 1,
            "linear_head_dim": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    fla.register_ops()
    yield
    config.reset()


def modeling(name: str) -> Any:
    module = f"transformers.models.{name}.modeling_{name}"
    if importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"this transformers has no {name}")
    return importlib.import_module(module)


def model(name: str) -> torch.nn.Module:
    configuration, kind, _, _, more = MODELS[name]
    package = importlib.import_module(f"transformers.models.{name}")
    known = inspect.signature(getattr(package, configuration)).parameters
    given = {key: value for key, value in {**COMMON, **more}.items() if key in known or "kwargs" in known}
    torch.manual_seed(0)
    made: torch.nn.Module = getattr(package, kind)(getattr(package, configuration)(**given))
    return made.to(DEVICE)


def train(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the gradients of the first one."""
    net = model(name)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (1, 80), generator=generator).to(DEVICE)
    losses, first = [], {}
    for step in range(STEPS):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = net(input_ids=tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        if step == 0:
            first = {n: p.grad.detach().clone() for n, p in net.named_parameters() if p.grad is not None}
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses, first


def last_route(op: str) -> Any:
    return importlib.import_module(f"cake.{op}").last_route()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_with_cake_as_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (_, _, function, op, _) = modeling(name), MODELS[name]
    calls: list[str] = []
    route = importlib.import_module(f"cake.{op}._route")
    note = route.note
    monkeypatch.setattr(route, "note", lambda found: (calls.append(found.backend), note(found))[1])
    losses, grads = train(name)
    assert calls, "cake was not called"
    monkeypatch.setattr(module, function, inspect.unwrap(getattr(module, function)))
    calls.clear()
    true_losses, true_grads = train(name)
    assert not calls
    assert set(grads) == set(true_grads)
    # bf16 operands on both sides; the reference sums in fp32. What is next to nothing beside the rest (a
    # router with one expert to choose) is judged against the rest.
    least = 1e-3 * torch.stack([grad.norm() for grad in true_grads.values()]).norm()
    for parameter, grad in grads.items():
        true = true_grads[parameter]
        assert (grad - true).norm() < 5e-2 * torch.maximum(true.norm(), least), parameter
    assert losses[-1] < losses[0] - 0.3
    assert max(abs(x - y) / y for x, y in zip(losses, true_losses, strict=True)) < 2e-2


@pytest.mark.parametrize("name", MODELS)
def test_boundaries_reach_the_op(name: str) -> None:
    """Documents in a pack get the bits that they get alone: nothing between model and kernel drops them."""
    function: Callable[..., Any] = getattr(modeling(name), MODELS[name][2])
    generator = torch.Generator().manual_seed(0)
    tokens, channels = 100, (128,) if MODELS[name][3] == "kda" else ()
    q, k, v = (torch.randn(1, tokens, 2, 128, generator=generator).bfloat16().to(DEVICE) for _ in range(3))
    g = -torch.rand(1, tokens, 2, *channels, generator=generator).to(DEVICE)
    beta = torch.rand(1, tokens, 2, generator=generator).to(DEVICE)
    cu_seqlens = torch.tensor([0, 37, tokens], device=DEVICE)
    packed, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
    for start, end in ((0, 37), (37, tokens)):
        part = [x[:, start:end] for x in (q, k, v, g, beta)]
        alone, _ = function(*part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True)
        assert_bitwise_equal("o", packed[:, start:end], alone)
