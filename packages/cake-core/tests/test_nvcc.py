"""The loader with a real nvcc: a library built without a GPU, loaded and called."""

import json
import subprocess

import pytest

from cake.core import build, cache, loader, toolchain
from cake.core.errors import BuildError, ToolchainError
from cake.core.testing.toolchain import write_package

pytestmark = pytest.mark.nvcc

HOST = """
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include "scale.cuh"

namespace {
int64_t count(tvm::ffi::TensorView x) {
  if (x.ndim() != 2) TVM_FFI_THROW(ValueError) << "x must have 2 axes, got " << x.ndim();
  return x.size(0) * x.size(1);
}
void scale_on(tvm::ffi::TensorView x, int64_t stream) {
  scale<<<1, 32, 0, reinterpret_cast<cudaStream_t>(stream)>>>(static_cast<__nv_bfloat16*>(x.data_ptr()));
}
}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(count, count);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_on, scale_on);
"""
DEVICE = """
#pragma once
#include <cuda_bf16.h>
__global__ void scale(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16(2.0f *
__bfloat162float(x[threadIdx.x])); }
"""
SPILLING = """
__global__ void crowded(float* x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 64; ++j) a[j] = a[j] * a[63 - j] + a[(7 * j) % 64];
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 32 + threadIdx.x] = a[i];
}
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "the cache"))
    monkeypatch.delenv("CAKE_DISABLE_JIT", raising=False)
    yield
    loader.release()


def package_of(folder, text, library="real", functions=(), flags=(), **more):
    record = {
        "library": library,
        "arch": "sm_90a",
        "sources": [f"{library}.cu"],
        "flags": ["-O1", *flags],
        "functions": list(functions),
        **more,
    }
    files = {f"csrc/{library}.cu": text, "_vendor/cake/include/scale.cuh": DEVICE}
    return write_package(folder, [record], files, ["../_vendor/cake/include"])


def test_build_load_call_and_move(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    root = package_of(tmp_path / "my op", HOST, functions=("count", "scale_on"))
    module = loader.load_from(root, "real", arch="9.0")
    assert module.count(torch.zeros(3, 5)) == 15
    with pytest.raises(ValueError, match="x must have 2 axes, got 1"):
        module.count(torch.zeros(3))

    ((path, entry, _),) = cache.entries()
    (kernel,) = entry.meta["kernels"]
    assert "scale" in kernel["name"]
    assert kernel["registers"] > 0
    assert kernel["spill_stores"] == kernel["spill_loads"] == 0
    assert entry.meta["nvcc"]["version"] == toolchain.find_nvcc().version
    needed = subprocess.run(
        ["readelf", "-d", str(entry.library)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtvm_ffi.so" in needed
    assert "libcudart" not in needed  # the runtime is linked in, so that no toolkit is needed where it runs
    assert "RPATH" not in needed
    assert "RUNPATH" not in needed
    assert not any(str(tmp_path) in part for part in entry.meta["command"])

    # The same cache elsewhere, on a machine without a compiler.
    cache.folder().rename(tmp_path / "moved")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "moved"))

    def missing():
        raise ToolchainError("no nvcc")

    monkeypatch.setattr(toolchain, "find_nvcc", missing)
    moved = loader.load_from(root, "real", arch="sm_90a")
    assert moved.count(torch.zeros(2, 2)) == 4
    assert path.name == next((tmp_path / "moved" / "libraries").iterdir()).name


def test_a_real_compile_error(tmp_path):
    root = package_of(tmp_path / "op", "__global__ void f() { undeclared(); }\n")
    with pytest.raises(BuildError) as caught:
        loader.load_from(root, "real", arch="sm_90a")
    assert 'csrc/real.cu(1): error: identifier "undeclared" is undefined' in str(caught.value)
    again = subprocess.run(
        caught.value.command, shell=True, cwd="/", check=False, capture_output=True, text=True
    )
    assert 'csrc/real.cu(1): error: identifier "undeclared" is undefined' in again.stdout + again.stderr


def test_real_spills_are_seen_and_can_be_allowed(tmp_path):
    root = package_of(tmp_path / "op", SPILLING, flags=["-maxrregcount=32"])
    with pytest.raises(BuildError, match=r"crowded\w*: \d+ bytes spill stores") as caught:
        loader.ensure(*first(root))
    assert "-warn-spills" in caught.value.command
    root = package_of(tmp_path / "op", SPILLING, flags=["-maxrregcount=32"], allow={"spills": ["crowded"]})
    entry = loader.ensure(*first(root))
    (kernel,) = json.loads((entry.path / "meta.json").read_text())["kernels"]
    assert kernel["spill_stores"] > 0
    assert kernel["registers"] == 32


def test_a_missing_symbol_fails_the_build_not_the_load(tmp_path):
    with pytest.raises(BuildError, match="undefined reference to"):
        loader.ensure(*first(package_of(tmp_path / "op", "void elsewhere();\nvoid f() { elsewhere(); }\n")))


def first(root):
    package = build.read_package(root)
    return package, package.records[0]


DRIVER = """
#include <cuda.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

int64_t release() {
  int version = 0;
  if (cuDriverGetVersion(&version) != CUDA_SUCCESS) TVM_FFI_THROW(RuntimeError) << "no driver";
  return version;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(release, release);
"""


def test_sources_may_call_the_driver_where_their_record_says_so(tmp_path, monkeypatch):
    """Tensor maps are made by the driver. It is built without one, and without a stub of it."""
    with pytest.raises(BuildError, match="undefined reference to `cuDriverGetVersion'"):
        loader.load_from(package_of(tmp_path / "a", DRIVER, "driver", ["release"]), "driver", arch="sm_90a")
    package = build.read_package(package_of(tmp_path / "b", DRIVER, "driver", ["release"], link=["cuda"]))
    loader.ensure(package, package.records[0])

    def absent(name, mode):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(toolchain.ctypes, "CDLL", absent)
    with pytest.raises(ToolchainError, match="driver calls the CUDA driver, which can't be loaded"):
        loader.load_from(package.root, "driver", arch="sm_90a")


@pytest.mark.gpu
def test_the_driver_answers(tmp_path):
    package = package_of(tmp_path, DRIVER, "driver", ["release"], link=["cuda"])
    version = loader.load_from(package, "driver", arch="sm_90a").release()
    assert (version // 1000, version % 1000 // 10) == toolchain.driver_cuda()
