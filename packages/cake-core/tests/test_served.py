"""What runs on which architecture is said, by package, before anything is built or launched."""

import json

import pytest

from cake.core import cache, loader, toolchain
from cake.core.cli import main
from cake.core.testing import installed_distribution
from cake.core.testing.toolchain import FakeToolkit

SPEC = """
from cake.core.spec import KernelPackage, OpSpec

TOY = OpSpec("toy", "cake-toy", kernel_packages=(
    KernelPackage("own", "cake_toy", "csrc"), KernelPackage("extra", "cake_toy", "_vendor/extra")))
BARE = OpSpec("bare", "cake-toy", kernel_packages=(KernelPackage("own", "cake_toy", "bare"),))
"""


def build_json(*records):
    listed = [{"library": n, "arch": a, "sources": ["x.cu"], "functions": ["answer"]} for n, a in records]
    return json.dumps({"schema": 1, "records": listed})


FILES = {
    "cake_toy/__init__.py": SPEC,
    "cake_toy/csrc/build.json": build_json(("fwd", "sm_90a"), ("bwd", "sm_90a")),
    "cake_toy/csrc/x.cu": "// own\n",
    "cake_toy/bare/build.json": build_json(("bare", "sm_90a")),
    "cake_toy/bare/x.cu": "// bare\n",
    "cake_toy/_vendor/extra/build.json": build_json(
        ("walk", "sm_90a"), ("walk", "sm_100a"), ("walk", "sm_103a"), ("walk", "sm_107a")
    ),
    "cake_toy/_vendor/extra/x.cu": "// extra\n",
}


@pytest.fixture
def toy(tmp_path):
    ops = {"toy": "cake_toy:TOY", "bare": "cake_toy:BARE"}
    with installed_distribution(tmp_path / "site", "cake-toy", ops=ops, files=FILES):
        yield
    loader.release()


@pytest.fixture
def kit(tmp_path, monkeypatch):
    kit = FakeToolkit(tmp_path / "cuda")
    monkeypatch.setenv("CAKE_NVCC", str(kit.nvcc))
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    return kit


def test_the_list_builds_nothing(toy, kit, capsys):
    assert main(["prebuild", "toy", "bare", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "sm_90a needs CUDA 12.3 or newer: nvcc 13.0.88 here (from CAKE_NVCC)",
        "  toy on sm_90a: own (fwd, bwd); extra (walk)",
        "  bare on sm_90a: own (bare)",
    ]
    assert lines[3:6] == [
        "sm_100a needs CUDA 12.8 or newer: nvcc 13.0.88 here (from CAKE_NVCC)",
        "  toy on sm_100a: extra (walk); no kernels of own",
        "  bare has no kernels for sm_100a; it has them for sm_90a",
    ]
    assert lines[9].startswith(
        f"sm_107a needs CUDA 13.4 or newer, and nvcc at {kit.nvcc} (from CAKE_NVCC) is"
    )
    assert "raises NotImplementedError before anything is launched" in lines[-1]
    assert kit.compiles == []


def test_the_list_needs_no_compiler(toy, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CAKE_NVCC", str(tmp_path / "gone"))
    assert main(["prebuild", "bare", "--list", "--arch", "10.3", "--arch", "8.0"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "sm_103a needs CUDA 12.9 or newer, and this machine has no nvcc",
        "  bare has no kernels for sm_103a; it has them for sm_90a",
        "sm_80 is unknown to cake, and this machine has no nvcc",
        "  bare has no kernels for sm_80; it has them for sm_90a",
    ]


def test_what_is_served_is_built_and_what_is_not_is_said(toy, kit, capsys):
    assert main(["prebuild", "toy", "bare", "--arch", "sm_103a"]) == 1  # bare has nothing to build
    said = capsys.readouterr().err
    assert "toy on sm_103a: extra (walk); no kernels of own" in said
    assert "bare has no kernels for sm_103a; it has them for sm_90a" in said
    assert "CPU tensors run the reference backend" in said
    assert len(cache.entries()) == len(kit.compiles) == 1
    assert main(["prebuild", "toy", "--arch", "sm_103a"]) == 0
    assert main(["prebuild", "toy", "bare", "--arch", "sm_90a"]) == 0
    assert "NotImplementedError" not in capsys.readouterr().err.split("[1/1]")[-1]
    assert len(cache.entries()) == 5


def test_a_compiler_that_is_too_old_is_said_before_it_runs(toy, kit, capsys):
    assert main(["prebuild", "toy", "--arch", "sm_107a"]) == 1
    assert "sm_107a needs CUDA 13.4 or newer, and nvcc at" in capsys.readouterr().err
    assert kit.compiles == []
    kit.plan(version="13.4.12")
    assert main(["prebuild", "toy", "--arch", "sm_107a"]) == 0
    assert len(kit.compiles) == 1


def test_a_call_is_refused_before_anything_is_launched(toy, kit):
    assert loader.load("toy", "walk", arch="sm_100a").answer() == 42
    with pytest.raises(NotImplementedError, match=r"toy: fwd has no build for sm_100a; .* for sm_90a"):
        loader.load("toy", "fwd", arch="sm_100a")
    with pytest.raises(NotImplementedError, match="bare has no build for sm_107a"):
        loader.load("bare", "bare", arch="sm_107a")
