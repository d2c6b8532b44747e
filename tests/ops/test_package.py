"""An op's package as an importer sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cake.core import registry


def test_names_of_the_package(op):
    for name in op.package.__all__:
        assert getattr(op.package, name) is not None
    assert set(op.package.__all__) <= set(dir(op.package))
    with pytest.raises(AttributeError, match="no attribute 'chunk_it'"):
        _ = op.package.chunk_it


def test_the_registry_finds_the_op(op):
    spec = registry.op_spec(op.name)
    assert spec is op.package.SPEC
    assert spec.distribution == f"cake-{op.name}"
    assert spec.variants == ("det", "fast")
    name = {"gdn": "chunk_gated_delta_rule", "kda": "chunk_kda"}[op.name]
    assert registry.entry(op.name, name) is getattr(op.package, name)


MODULES = {
    "gdn": ["cake.gdn", "cake.gdn.spec", "cake.gdn.plan", "cake.gdn._route"],
    "kda": ["cake.kda", "cake.kda.spec", "cake.kda._route"],
}


@pytest.mark.parametrize(
    ("op", "module"), [(op, module) for op, each in MODULES.items() for module in each], indirect=["op"]
)
def test_importing_loads_no_torch(module):
    # A declaration has to be readable by a launcher that has neither torch nor a GPU.
    code = f"import sys, {module}; sys.exit(sorted({{'torch', 'tvm_ffi', 'numpy'}} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_cpu_needs_no_toolchain(op, tmp_path):
    # No nvcc, no driver, no cache folder, no compile: forward and backward on the torch twins.
    code = """
import importlib, sys, torch
from cake.core import entry, no_build
op, name = sys.argv[1:]
q, k, v = (torch.randn(1, 70, 2, 128).bfloat16().requires_grad_() for _ in range(3))
g, beta = -torch.rand(1, 70, 2, *[128] * (op == "kda")), torch.rand(1, 70, 2)
with no_build():
    o, _ = entry(op, name)(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    o.float().sum().backward()
route = importlib.import_module(f"cake.{op}").last_route()
assert route.backend == "torch", route
assert not torch.cuda.is_initialized()
assert f"cake.{op}._cuda" not in sys.modules
"""
    cache = tmp_path / "cache"
    result = subprocess.run(
        [sys.executable, "-c", code, op.name, op.chunk.__name__],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "CAKE_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert not cache.exists()
