"""doctor says what is here, and in plain words what would stop a run."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cake.core import _gpu, _report, cli, loader, toolchain
from cake.core._gpu import Driver, Gpu
from cake.core.errors import BuildError, NoBuildError, ToolchainError
from cake.core.testing import installed_distribution

torch = pytest.importorskip("torch")

H200 = Driver((13, 0), (Gpu("NVIDIA H200", (9, 0), 141 * 2**30),), None)
A100 = Driver((12, 4), (Gpu("NVIDIA A100", (8, 0), 80 * 2**30),), None)
NONE = Driver(None, (), "no NVIDIA driver (libcuda.so.1 can't be loaded)")
NVCC = toolchain.Nvcc(Path("/opt/cuda/bin/nvcc"), "13.0.88", "CUDA_HOME", "V13.0.88", ("PATH has no nvcc",))


@contextmanager
def machine(
    monkeypatch: pytest.MonkeyPatch, driver: Driver = H200, nvcc: Any = NVCC, cuda: str | None = "13.0"
) -> Iterator[None]:
    """A machine with this driver, compiler (an exception where there is none) and torch build."""

    def find_nvcc() -> Any:
        if isinstance(nvcc, Exception):
            raise nvcc
        return nvcc

    with monkeypatch.context() as patch:
        patch.setattr(_report, "query", lambda: driver)
        patch.setattr(toolchain, "find_nvcc", find_nvcc)
        patch.setattr(toolchain, "driver_cuda", lambda: driver.cuda)
        patch.setattr(toolchain, "host_compiler", lambda: Path("/usr/bin/g++"))
        patch.setattr(torch.version, "cuda", cuda)
        yield


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Say which libraries the cache holds; all others are missing. The folder itself is empty."""
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))
    held: set[str] = set()

    def ensure(package: Any, record: Any, *, run_here: bool = False) -> Any:
        if record.library not in held:
            raise NoBuildError(f"{record.library} is not in the cache")
        return SimpleNamespace()

    monkeypatch.setattr(loader, "ensure", ensure)
    return held


def stops() -> list[str]:
    return [finding.text for finding in _report.collect().findings if finding.stops]


def about_toy(texts: list[str]) -> list[str]:
    return [text for text in texts if "'toy'" in text or text.startswith("toy")]


def test_a_machine_that_could_build_what_it_needs(
    toy: Any, cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(monkeypatch):
        report = _report.collect()
    sections = {title: dict(rows) for title, rows in report.sections.items()}
    assert sections["GPU"]["cuda:0"] == "NVIDIA H200, capability 9.0, 141 GiB"
    assert sections["Compiler"]["nvcc"] == "13.0.88 at /opt/cuda/bin/nvcc, found through CUDA_HOME"
    assert (
        sections["Ops"]["toy on sm_90a"]
        == "1 of 1 libraries will be built on first use (or: cake prebuild toy)"
    )
    assert not about_toy(stops())


def test_a_prebuilt_cache_needs_no_compiler(toy: Any, cached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cached.add("toy")
    with machine(monkeypatch, nvcc=ToolchainError("no nvcc: PATH has no nvcc")):
        report = _report.collect()
    assert dict(report.sections["Ops"])["toy on sm_90a"] == "all libraries are in the cache"
    assert not about_toy([finding.text for finding in report.findings if finding.stops])
    assert any("no nvcc" in finding.text and not finding.stops for finding in report.findings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"nvcc": ToolchainError("no nvcc: PATH has no nvcc")},
            ["toy for sm_90a", "not in the cache", "no nvcc"],
        ),
        (
            {"nvcc": toolchain.Nvcc(Path("/old/nvcc"), "11.8.89", "PATH", "V11.8.89")},
            ["sm_90a needs CUDA 12.3", "11.8.89"],
        ),
        ({"driver": Driver((12, 4), H200.gpus, None), "cuda": "12.4"}, ["driver", "CUDA 13", "CUDA 12.4"]),
    ],
    ids=["no nvcc", "old nvcc", "old driver"],
)
def test_a_library_that_is_missing_and_cannot_be_built_stops_a_run(
    toy: Any, cached: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: list[str]
) -> None:
    with machine(monkeypatch, **change):
        (text,) = about_toy(stops())
    for word in words:
        assert word in text


def test_forbidden_compiling_stops_a_run(toy: Any, cached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAKE_DISABLE_JIT", "1")
    with machine(monkeypatch):
        (text,) = about_toy(stops())
        assert "CAKE_DISABLE_JIT" in text
        cached.add("toy")
        assert not about_toy(stops())


def test_a_gpu_that_the_op_has_no_kernels_for_stops_a_run(
    toy: Any, cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(monkeypatch, driver=A100, cuda="12.4"):
        (text,) = about_toy(stops())
    assert "toy has no kernels for sm_80; it has them for sm_90a" in text


def test_a_library_that_is_there_and_cannot_be_used_counts_as_missing(
    toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path))

    def ensure(*args: Any, **kwargs: Any) -> Any:
        raise BuildError("damaged")

    monkeypatch.setattr(loader, "ensure", ensure)
    with machine(monkeypatch):
        rows = dict(_report.collect().sections["Ops"])
    assert rows["toy on sm_90a"].startswith("1 of 1 libraries will be built")


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        (H200, None, ["has a GPU", "build without CUDA"]),
        (A100, "13.0", ["torch is built for CUDA 13.0", "driver serves CUDA 12.4"]),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_stops_a_run(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, cuda: str | None, words: list[str]
) -> None:
    with machine(monkeypatch, driver=driver, cuda=cuda):
        texts = [text for text in stops() if "torch" in text]
    for word in words:
        assert word in texts[0]


@pytest.mark.parametrize("version", ["2.7.1", "2.6.0+cu124"])
def test_a_torch_that_is_too_old_stops_a_run(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with machine(monkeypatch, driver=NONE):
        assert f"torch {version} is too old: cake needs torch>=2.8" in stops()


@pytest.mark.parametrize("module", ["torch", "tvm_ffi"])
def test_a_dependency_that_cannot_be_imported_stops_a_run(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    real = _report.import_module

    def broken(name: str) -> Any:
        if name == module:
            raise OSError("libcudart.so.12: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(_report, "import_module", broken)
    with machine(monkeypatch, driver=NONE):
        assert any(f"{module} can't be imported (OSError: libcudart" in text for text in stops())


def test_a_machine_without_a_gpu_runs_on_the_cpu(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(monkeypatch, driver=NONE, nvcc=ToolchainError("no nvcc"), cuda=None):
        report = _report.collect()
    assert report.ok, report.findings
    assert any("no GPU" in finding.text and "CPU" in finding.text for finding in report.findings)


def test_kernels_that_cannot_be_read_stop_a_run_on_a_gpu(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cake.core import registry

    (registry.op_spec("toy").kernel_packages[0].root() / "build.json").unlink()
    with machine(monkeypatch):
        assert "build.json" in about_toy(stops())[0]
    with machine(monkeypatch, driver=NONE):
        assert not about_toy(stops())


def test_a_cache_that_cannot_be_written_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with machine(monkeypatch):
        report = _report.collect()
    assert dict(report.sections["Cache"])["writable"] == "no"
    assert any("can't be written to" in finding.text for finding in report.findings)


def test_nothing_is_created(toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    with machine(monkeypatch):
        _report.collect()
    assert not (tmp_path / "deep").exists()


def test_a_malformed_variable_and_a_broken_op_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAKE_JOBS", "many")
    monkeypatch.setenv("CAKE_FLA", "1")
    monkeypatch.setenv("CAKE_CUDA_ARCH_LIST", "9.0a;hopper")
    files = {"cake_bad.py": "raise RuntimeError('no luck')"}
    bad = installed_distribution(tmp_path, "cake-bad", ops={"bad": "cake_bad:SPEC"}, files=files)
    with bad, machine(monkeypatch, driver=NONE):
        texts = stops()
    assert any("CAKE_JOBS" in text and "'many'" in text for text in texts)
    assert any("'bad' is installed and can't be used: RuntimeError: no luck" in text for text in texts)
    assert any("cuda_arch_list (environment CAKE_CUDA_ARCH_LIST)" in t and "'hopper'" in t for t in texts)
    assert any("fla is on (environment CAKE_FLA)" in text for text in texts)


def test_the_command(toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with machine(monkeypatch, driver=NONE, cuda=None):
        assert cli.main(["doctor"]) == 0
        text = capsys.readouterr().out
        for title in ("Python", "GPU", "Compiler", "Cache", "Configuration", "Environment", "Ops"):
            assert f"\n{title}\n" in "\n" + text
        assert "toy" in text
        assert "Nothing found that would stop a run." in text
        assert cli.main(["doctor", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"] is True
        monkeypatch.setenv("CAKE_LOG", "[loud]")
        assert cli.main(["doctor"]) == 1
        text = capsys.readouterr().out
        assert "STOPS A RUN: environment variable CAKE_LOG" in text
        assert "'[loud]'" in text
        assert cli.main(["doctor", "--json"]) == 1


# ---- the driver itself


class FakeCuda:
    """libcuda with two devices, or with an error from cuInit."""

    def __init__(self, init: int = 0) -> None:
        self._init = init

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGetName(self, name: Any, size: int, index: int) -> int:
        name.value = f"GPU {index}".encode()
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, index: int) -> int:
        out._obj.value = {75: 9, 76: index}[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, index: int) -> int:
        out._obj.value = 2**30
        return 0


def test_the_driver_is_asked_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "_load", lambda name: FakeCuda())
    assert _gpu.query() == Driver((13, 1), (Gpu("GPU 0", (9, 0), 2**30), Gpu("GPU 1", (9, 1), 2**30)), None)


@pytest.mark.parametrize(
    ("status", "words"), [(100, "sees no GPU"), (803, "don't fit together"), (999, "cuInit returned 999")]
)
def test_a_driver_that_fails_says_why(status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu, "_load", lambda name: FakeCuda(status))
    found = _gpu.query()
    assert found.cuda == (13, 1)
    assert found.gpus == ()
    assert found.error is not None
    assert words in found.error


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ctypes.CDLL:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(_gpu, "_load", load)
    assert _gpu.query() == NONE


@pytest.mark.gpu
def test_the_real_driver_agrees_with_torch() -> None:
    found = _gpu.query()
    assert found.error is None
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.gpus[0].capability == torch.cuda.get_device_capability(0)
    assert found.gpus[0].name == torch.cuda.get_device_name(0)


@pytest.mark.parametrize(
    ("version", "row", "notes"),
    [
        ("0.6.0", "0.6.0", 1),
        ("0.4.2", "0.4.2: cake registers with flash-linear-attention >=0.5,<0.7, got 0.4.2", 0),
    ],
)
def test_flash_linear_attention_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, row: str, notes: int
) -> None:
    source = "from cake.core.spec import OpSpec\nSPEC = OpSpec('called', 'cake-called', fla='a:b')"
    files = {"cake_called.py": source}
    op = installed_distribution(
        tmp_path / "op", "cake-called", ops={"called": "cake_called:SPEC"}, files=files
    )
    library = installed_distribution(tmp_path / "fla", "fla-core", version=version)
    with op, library, machine(monkeypatch, driver=NONE):
        report = _report.collect()
    assert dict(report.sections["Python"])["flash-linear-attention"] == row
    told = [f.text for f in report.findings if "import cake.called.fla" in f.text]
    assert len(told) == notes
    assert not any(finding.stops for finding in report.findings if "flash-linear" in finding.text)
