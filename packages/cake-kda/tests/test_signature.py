"""The call as flash-linear-attention's users write it."""

from __future__ import annotations

import inspect

import pytest
import torch

from cake.core.testing import assert_bitwise_equal
from cake.kda import chunk_kda

# Positional, as in flash-linear-attention 0.6.0.
POSITIONAL = {
    "q": inspect.Parameter.empty,
    "k": inspect.Parameter.empty,
    "v": inspect.Parameter.empty,
    "g": inspect.Parameter.empty,
    "beta": inspect.Parameter.empty,
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
}
# Taken there by name alone, then ours.
BY_NAME = {
    "A_log": None,
    "dt_bias": None,
    "chunk_size": 64,
    "transpose_state_layout": None,
    "variant": None,
    "recompute_state": None,
    "segments": None,
    "packing_invariant": False,
    "backend": None,
}


def test_signature():
    parameters = inspect.signature(chunk_kda).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert len(positional) + len(by_name) == len(parameters), "no *args, no **kwargs"
    assert [(p.name, p.default) for p in positional] == list(POSITIONAL.items())
    assert {p.name: p.default for p in by_name} == BY_NAME


def test_every_argument_is_documented():
    documentation = inspect.getdoc(chunk_kda)
    for name in (*POSITIONAL, *BY_NAME):
        assert f"    {name}: " in documentation, name
    for section in ("Returns:", "Raises:", "Determinism:"):
        assert section in documentation


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_positional_call(make):
    case = make((70, 65), heads=(1, 2))
    cu = torch.tensor(case.boundaries)
    a_log, bias = torch.randn(2), torch.randn(256)
    by_position = chunk_kda(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        0.1,
        case.initial_state,
        True,
        True,
        True,
        True,
        True,
        True,
        -3.0,
        False,
        False,
        True,
        cu,
        cu,
        A_log=a_log,
        dt_bias=bias,
    )
    by_name = chunk_kda(
        q=case.q,
        k=case.k,
        v=case.v,
        g=case.g,
        beta=case.beta,
        scale=0.1,
        initial_state=case.initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        safe_gate=True,
        lower_bound=-3.0,
        state_v_first=True,
        cu_seqlens=cu,
        A_log=a_log,
        dt_bias=bias,
    )
    for name, a, b in zip(("o", "final state"), by_position, by_name, strict=True):
        assert_bitwise_equal(name, a, b)
