"""`prebuild` and `cake prebuild`, `cake cache`: everything an op needs, in parallel, without a GPU."""

import json
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

import cake.core
from cake.core import _prebuild, cache, loader, toolchain
from cake.core.cli import main
from cake.core.errors import BuildError, ConfigError, NoBuildError, ToolchainError, UnknownOpError
from cake.core.testing import installed_distribution
from cake.core.testing.toolchain import raises_soon, write_package

SPEC = """
from cake.core.spec import KernelPackage, OpSpec
SPEC = OpSpec("toy", "cake-toy", kernel_packages=(KernelPackage("own", "toy_op"),), prebuild_params={"heads":
"q heads"})
"""
RECORDS = [
    {"library": f"toy_{name}", "arch": arch, "sources": [f"{name}.cu"], "functions": ["answer"]}
    for arch in ("sm_90a", "sm_100a")
    for name in ("prep", "scan", "out")
]


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in (
        *("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "CAKE_DISABLE_JIT", "CAKE_JOBS", "MAX_JOBS"),
        *("CAKE_CUDA_ARCH_LIST", "CAKE_LOG"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "the cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    yield
    cake.core.release()


@pytest.fixture
def toy(tmp_path):
    folder = tmp_path / "site"
    write_package(
        folder / "toy_op", RECORDS, {f"csrc/{name}.cu": f"// {name}\n" for name in ("prep", "scan", "out")}
    )
    files = {"toy_op/__init__.py": "", "toy_op/spec.py": SPEC}
    with installed_distribution(folder, "cake-toy", ops={"toy": "toy_op.spec:SPEC"}, files=files):
        yield folder


def test_everything_of_an_architecture_and_nothing_else(kit, toy):
    entries = cake.core.prebuild("toy", arch="9.0a")
    assert [entry.meta["library"] for entry in entries] == ["toy_prep", "toy_scan", "toy_out"]
    assert {entry.meta["arch"] for entry in entries} == {"sm_90a"}
    assert len(kit.compiles) == 3
    with cake.core.no_build():
        for record in RECORDS[:3]:
            assert cake.core.load("toy", record["library"], arch="sm_90a").answer() == 42
        with pytest.raises(NoBuildError):
            cake.core.load("toy", "toy_prep", arch="sm_100a")
    assert len(kit.compiles) == 3


def test_what_was_prebuilt_is_remembered_until_release(kit, toy):
    cake.core.prebuild("toy", arch="sm_90a")
    cache.clear()
    (toy / "toy_op/csrc/prep.cu").write_text("// edited\n")
    assert len(cake.core.prebuild("toy", arch="sm_90a")) == 3
    assert len(kit.compiles) == 3
    cake.core.release()
    cake.core.prebuild("toy", arch="sm_90a")
    assert len(kit.compiles) == 6


def test_model_parameters(kit, toy):
    cake.core.prebuild("toy", arch="sm_90a", heads=16)
    cake.core.prebuild("toy", arch="sm_90a", heads=48)
    assert len(kit.compiles) == 3
    with pytest.raises(
        TypeError, match=r"prebuild\('toy'\) takes no parameter 'layers'; the op lists: heads"
    ):
        cake.core.prebuild("toy", arch="sm_90a", layers=2)
    with pytest.raises(UnknownOpError, match="toy"):
        cake.core.prebuild("nothing", arch="sm_90a")


def test_what_to_build_for(kit, toy, monkeypatch):
    assert _prebuild.architectures(arch="9.0; 10.0") == ("sm_90a", "sm_100a")
    assert _prebuild.architectures(arch=["9.0", "90a"]) == ("sm_90a",)
    with pytest.raises(ValueError, match="device or arch, not both"):
        _prebuild.architectures("cuda:0", "sm_90a")
    monkeypatch.setattr(toolchain, "device_arch", lambda device: {"cuda:1": "sm_100a", 0: "sm_90a"}[device])
    assert _prebuild.architectures("cuda:1") == ("sm_100a",)
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert _prebuild.architectures() == ("sm_90a",)
    monkeypatch.setenv("CAKE_CUDA_ARCH_LIST", "10.0+PTX")
    assert _prebuild.architectures() == ("sm_100a",)
    assert _prebuild.architectures(arch="9.0") == ("sm_90a",)  # the call wins over the environment
    monkeypatch.setenv("CAKE_CUDA_ARCH_LIST", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"no GPU is visible, so say what to build for: arch='sm_90a'"):
        cake.core.prebuild("toy")
    with pytest.raises(
        NotImplementedError, match="toy has no kernels for sm_80; it has them for sm_100a, sm_90a"
    ):
        cake.core.prebuild("toy", arch="8.0")
    assert kit.compiles == []


def most_at_once(kit, *, workers=None):
    """The largest number of compiles whose folders existed at the same time, by a watcher's count."""
    import threading

    most, stop = 0, threading.Event()

    def watch():
        nonlocal most
        while not stop.is_set():
            tmp = cache.folder() / "tmp"
            most = max(most, len(list(tmp.iterdir())) if tmp.exists() else 0)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cake.core.prebuild("toy", arch="9.0 10.0", max_workers=workers)
    finally:
        stop.set()
        watcher.join()
    return most


def test_the_number_of_compilers(kit, toy, monkeypatch):
    kit.plan(seconds=0.3)
    monkeypatch.setenv("MAX_JOBS", "2")
    assert most_at_once(kit) == 2
    cake.core.release()
    cache.clear()
    assert most_at_once(kit, workers=6) > 2
    with pytest.raises(ConfigError, match="jobs"):
        cake.core.prebuild("toy", arch="sm_90a", max_workers=0)


def test_one_failure_keeps_what_succeeded(kit, toy):
    (toy / "toy_op/csrc/scan.cu").write_text("#error fail\n")
    script = kit.bin / "nvcc.py"
    script.write_text(
        script.read_text().replace(
            "digest.update(",
            "b'#error' in pathlib.Path(name).read_bytes() and sys.exit('an #error'); digest.update(",
        )
    )
    with pytest.raises(BuildError, match="an #error"):
        cake.core.prebuild("toy", arch="sm_90a")
    assert sorted(entry.meta["library"] for _, entry, _ in cache.entries()) == ["toy_out", "toy_prep"]


def test_lines_on_the_logger(kit, toy, caplog):
    with caplog.at_level(logging.INFO, logger="cake"):
        cake.core.prebuild("toy", arch="sm_90a", max_workers=1)
    lines = [record.getMessage() for record in caplog.records if record.name == "cake.prebuild"]
    assert [line.split(":")[0] for line in lines] == [
        f"[{i}/3] toy_{name} (sm_90a)" for i, name in enumerate(("prep", "scan", "out"), 1)
    ]
    assert all("built in" in line for line in lines)


def test_a_bar_on_a_terminal(kit, toy, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert len(cake.core.prebuild("toy", arch="sm_90a")) == 3
    said = capsys.readouterr().err
    assert "cake prebuild toy sm_90a" in said
    assert "3/3" in said


def test_no_nvcc_is_one_error(toy, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(toolchain, "_wheel_nvccs", list)
    raises_soon(ToolchainError, lambda: cake.core.prebuild("toy", arch="sm_90a"), match="no nvcc")


# ---- the command


def environment(toy):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(toy), os.environ.get("PYTHONPATH", "")])}


def test_the_command_needs_no_gpu_and_no_torch(kit, toy):
    code = (
        "import sys\n"
        "from cake.core.cli import main\n"
        "status = main(['prebuild', 'toy', '--arch', '9.0', '--arch', '10.0', '--jobs', '2'])\n"
        "print([m for m in ('torch', 'tvm_ffi') if m in sys.modules])\n"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(toy), check=True
    )
    assert done.stdout.splitlines() == [str(cache.folder()), "[]"]
    lines = done.stderr.splitlines()
    assert len(lines) == 6
    assert lines[-1].startswith("[6/6] toy_")
    assert len(cache.entries()) == 6


def test_the_commands_errors(kit, toy, capsys):
    assert main(["prebuild", "toy", "--arch", "hopper"]) == 2
    assert "arch must look like 'sm_90a'" in capsys.readouterr().err
    assert main(["prebuild", "toy", "nothing", "--arch", "9.0"]) == 1
    assert "nothing" in capsys.readouterr().err
    assert main(["prebuild", "toy", "--arch", "8.0"]) == 1
    assert "toy has no kernels for sm_80" in capsys.readouterr().err
    assert kit.compiles == []
    kit.plan(status=3, output="tiny.cu(1): error")
    assert main(["prebuild", "toy", "--arch", "9.0"]) == 1
    assert "tiny.cu(1): error" in capsys.readouterr().err


def test_an_interrupt_stops_the_compilers(kit, toy):
    kit.plan(seconds=60)
    command = [sys.executable, "-m", "cake.core.cli", "prebuild", "toy", "--arch", "9.0", "--jobs", "2"]
    command[1:3] = ["-c", "import sys; from cake.core.cli import main; sys.exit(main())"]
    builder = subprocess.Popen(command, env=environment(toy), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(kit.compiles) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    builder.send_signal(signal.SIGINT)
    assert builder.wait(timeout=20) == 130
    assert len(kit.compiles) == 2
    for compile in kit.compiles:
        with pytest.raises(ProcessLookupError):
            os.kill(compile["pid"], 0)
    assert list((cache.folder() / "tmp").iterdir()) == []


def test_cache_info_and_clear(kit, toy, capsys):
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(cache.folder()), "empty"]
    assert not cache.folder().exists()
    entries = cake.core.prebuild("toy", arch="sm_90a")
    assert main(["cache", "info"]) == 0
    said = capsys.readouterr().out
    for part in (entries[0].path.name, "sm_90a", "13.0.88", "3 libraries", "ok"):
        assert part in said
    entries[1].library.write_bytes(b"")
    assert main(["cache", "info"]) == 1
    assert (
        f"{entries[1].path.name} is damaged and will be built again: the library has 0"
        in capsys.readouterr().out
    )
    assert main(["cache", "info", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["folder"] == str(cache.folder())
    assert [bool(row["damage"]) for row in data["libraries"]] == [False, False, True]
    assert main(["cache", "clear", "--library", "toy_prep"]) == 0
    assert "removed 1 libraries" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "info"]) == 0
    assert loader.loaded() == ()
