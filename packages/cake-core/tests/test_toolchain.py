"""Finding nvcc and the host compiler, and the sentences that say what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cake.core import toolchain
from cake.core.errors import ConfigError, ToolchainError
from cake.core.testing.toolchain import FakeToolkit, raises_soon

VARIABLES = ("CAKE_NVCC", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "CAKE_JOBS", "MAX_JOBS")


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """No toolkit anywhere: nothing in the environment, an empty PATH, no wheels."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(toolchain, "_wheel_nvccs", list)


def executable(path: Path, text: str = "#!/bin/sh\nexit 0\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("9.0", "sm_90a"),
        ("9.0a", "sm_90a"),
        ("90", "sm_90a"),
        ("90a", "sm_90a"),
        ("sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("compute_90a", "sm_90a"),
        ("9.0+PTX", "sm_90a"),
        (" 9.0a+ptx ", "sm_90a"),
        ("10.0", "sm_100a"),
        ("100", "sm_100a"),
        ("10.3a", "sm_103a"),
        ("sm_107a", "sm_107a"),
        ("8.0", "sm_80"),
    ],
)
def test_arch_spellings(text, arch):
    assert toolchain.parse_arch(text) == arch


@pytest.mark.parametrize("text", ["", "hopper", "9", "sm_", "90b", "8.0a", "9.0+", "sm_90a sm_100a"])
def test_what_is_no_arch_is_refused(text):
    with pytest.raises(ValueError, match="arch"):
        toolchain.parse_arch(text)


def test_arch_lists():
    assert toolchain.parse_arch_list("9.0a; 10.0+PTX,90 sm_103a") == ("sm_90a", "sm_100a", "sm_103a")
    with pytest.raises(ValueError, match="empty"):
        toolchain.parse_arch_list(" ; ")


def test_device_arch_wants_a_cuda_device():
    with pytest.raises(ValueError, match="must be a CUDA device, got 'cpu'"):
        toolchain.device_arch("cpu")
    with pytest.raises(ValueError, match="must be a CUDA device, got 'gpu'"):
        toolchain.device_arch("gpu")
    with pytest.raises(ValueError, match="must be a CUDA device that is there, got 'cuda:99'"):
        toolchain.device_arch("cuda:99")


def test_order(monkeypatch, tmp_path):
    kits = {name: FakeToolkit(tmp_path / name, version=f"13.{i}.1") for i, name in enumerate("abcde")}
    monkeypatch.setattr(toolchain, "_wheel_nvccs", lambda: [kits["e"].nvcc])
    found = toolchain.find_nvcc()
    assert (found.path, found.version, found.how) == (kits["e"].nvcc, "13.4.1", "wheel")
    assert found.release == (13, 4)
    for name, variable, how in (
        ("d", "PATH", "PATH"),
        ("c", "CUDA_PATH", "CUDA_PATH"),
        ("b", "CUDA_HOME", "CUDA_HOME"),
        ("a", "CAKE_NVCC", "CAKE_NVCC"),
    ):
        at = {"PATH": kits[name].bin, "CAKE_NVCC": kits[name].nvcc}.get(variable, kits[name].root)
        monkeypatch.setenv(variable, str(at))
        found = toolchain.find_nvcc()
        assert (found.path, found.how) == (kits[name].nvcc, how)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_is_unset(monkeypatch, tmp_path, empty):
    kit = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("PATH", str(kit.bin))
    for name in ("CAKE_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, empty)
    assert toolchain.find_nvcc().how == "PATH"


def test_a_runtime_only_cuda_home_is_passed_over_and_named(monkeypatch, tmp_path):
    home = tmp_path / "runtime only"
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libcudart.so.13").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(ToolchainError, match=r"runtime only holds a CUDA runtime but no bin/nvcc"):
        toolchain.find_nvcc()
    kit = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("PATH", str(kit.bin))
    found = toolchain.find_nvcc()
    assert found.how == "PATH"
    assert any("runtime only" in note for note in found.notes)


def test_nothing_found_names_every_place_and_the_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    text = str(raises_soon(ToolchainError, toolchain.find_nvcc))
    for part in (
        "CUDA_HOME=",
        "has no bin/nvcc",
        "CUDA_PATH is unset",
        "PATH has no nvcc",
        "nvidia-cuda-nvcc",
    ):
        assert part in text
    assert "pip install 'cake-core[nvcc]'" in text
    assert "\n" not in text


def test_cake_nvcc_is_an_order(monkeypatch, tmp_path):
    kit = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUDA_HOME", str(kit.root))
    monkeypatch.setenv("CAKE_NVCC", str(tmp_path / "missing"))
    with pytest.raises(ToolchainError, match=r"CAKE_NVCC=.*missing does not exist"):
        toolchain.find_nvcc()
    monkeypatch.setenv("CAKE_NVCC", str(kit.root))
    with pytest.raises(ToolchainError, match="is not an executable file"):
        toolchain.find_nvcc()
    monkeypatch.setenv("CAKE_NVCC", str(executable(tmp_path / "not-nvcc")))
    with pytest.raises(ToolchainError, match="is not an nvcc"):
        toolchain.find_nvcc()


def test_a_broken_nvcc_is_passed_over(monkeypatch, tmp_path):
    executable(tmp_path / "broken" / "bin" / "nvcc", "#!/nowhere/python\n")
    kit = FakeToolkit(tmp_path / "kit with a space")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "broken"))
    monkeypatch.setenv("PATH", str(kit.bin))
    found = toolchain.find_nvcc()
    assert found.path == kit.nvcc
    assert any("could not be run" in note for note in found.notes)


def test_a_replaced_nvcc_is_asked_again(monkeypatch, tmp_path):
    kit = FakeToolkit(tmp_path / "kit", version="12.8.93")
    monkeypatch.setenv("CAKE_NVCC", str(kit.nvcc))
    assert toolchain.find_nvcc().version == "12.8.93"
    kit.plan(version="13.0.188")
    assert toolchain.find_nvcc().version == "13.0.188"


def test_wheels_are_found_below_the_namespace_package(tmp_path):
    kit = FakeToolkit(tmp_path / "site" / "nvidia" / "cu99")
    for name in ("cu9", "cu98", "cuda_nvcc"):
        executable(tmp_path / "site" / "nvidia" / name / "bin" / "nvcc")
    (tmp_path / "site" / "nvidia" / "cublas").mkdir()
    code = (
        "from cake.core import toolchain; n = toolchain.find_nvcc(); print(n.path, n.how, n.notes, sep='\\n')"
    )
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        check=True,
    )
    found, how, notes = done.stdout.splitlines()
    assert (found, how) == (str(kit.nvcc), "wheel")
    assert "PATH has no nvcc" in notes


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("sm_90a", "12.2.140", "12.3.52"),
        ("sm_100a", "12.6.85", "12.8.61"),
        ("sm_103a", "12.8.93", "12.9.41"),
        ("sm_107a", "13.3.12", "13.4.10"),
        ("sm_90a", "11.8.89", "13.0.88"),
    ],
)
def test_least_cuda_per_architecture(monkeypatch, tmp_path, arch, old, new):
    kit = FakeToolkit(tmp_path / "kit", version=old)
    monkeypatch.setenv("CAKE_NVCC", str(kit.nvcc))
    least = ".".join(str(n) for n in toolchain.MIN_CUDA[arch])
    raises_soon(
        ToolchainError,
        lambda: toolchain.check_arch(toolchain.find_nvcc(), arch),
        match=rf"{arch} needs CUDA {least} or newer, and nvcc at .* is {old}; ",
    )
    kit.plan(version=new)
    toolchain.check_arch(toolchain.find_nvcc(), arch)


def test_host_compiler(monkeypatch, tmp_path):
    with pytest.raises(ToolchainError, match=r"g\+\+, and PATH has none; install it"):
        toolchain.host_compiler()
    executable(tmp_path / "bin" / "gcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ToolchainError, match=r"gcc is there, but without g\+\+ it compiles no C\+\+"):
        toolchain.host_compiler()
    gxx = executable(tmp_path / "bin" / "g++")
    assert toolchain.host_compiler() == gxx
    other = executable(tmp_path / "other" / "g++-13")
    monkeypatch.setenv("NVCC_CCBIN", str(other))
    assert toolchain.host_compiler() == other
    monkeypatch.setenv("NVCC_CCBIN", "gone")
    with pytest.raises(ToolchainError, match="NVCC_CCBIN=gone is not an executable"):
        toolchain.host_compiler()


def test_a_driver_older_than_the_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (12, 4))
    with pytest.raises(
        ToolchainError, match=r"needs a driver for CUDA 13, but this machine's driver serves CUDA 12\.4"
    ):
        toolchain.check_driver("13.0.88", "gdn_prep")
    toolchain.check_driver("12.9.41", "gdn_prep")  # newer within the major is fine
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    toolchain.check_driver("13.0.88", "gdn_prep")


def test_the_drivers_functions_are_exposed_or_its_absence_said(monkeypatch):
    asked = []
    monkeypatch.setattr(toolchain.ctypes, "CDLL", lambda name, mode: asked.append((name, mode)))
    toolchain.expose_driver("walk")
    assert asked == [("libcuda.so.1", toolchain.ctypes.RTLD_GLOBAL)]

    def absent(name, mode):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(toolchain.ctypes, "CDLL", absent)
    with pytest.raises(ToolchainError, match=r"walk calls the CUDA driver, which can't be loaded \(libcuda"):
        toolchain.expose_driver("walk")


def test_jobs(monkeypatch):
    assert toolchain.jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.jobs() == 3
    monkeypatch.setenv("CAKE_JOBS", "5")
    assert toolchain.jobs() == 5
    assert toolchain.jobs(7) == 7
    for bad in ("0", "-1", "many"):
        monkeypatch.setenv("CAKE_JOBS", bad)
        with pytest.raises(ConfigError, match="CAKE_JOBS"):
            toolchain.jobs()
    with pytest.raises(ConfigError, match="jobs"):
        toolchain.jobs(0)


def test_flag_variables_of_nvcc_are_dropped(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
    assert not {"NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"} & set(toolchain.environment())


def test_looking_for_a_toolkit_imports_no_torch():
    code = (
        "import sys; from cake.core import toolchain, build, cache, loader, _prebuild\n"
        "try: toolchain.find_nvcc()\n"
        "except Exception as error: pass\n"
        "build.tvm_ffi_root(); toolchain.driver_cuda()\n"
        "print([m for m in ('torch', 'tvm_ffi', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
