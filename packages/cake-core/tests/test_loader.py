"""Loading: what is built, what is found, and what is said when neither can be. The compiler is a fake one."""

import importlib
import json
import logging
import os
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cake.core import build, cache, loader, toolchain
from cake.core.errors import BuildError, NoBuildError, ToolchainError
from cake.core.spec import KernelPackage, OpSpec
from cake.core.testing.toolchain import FakeToolkit, raises_soon, write_package

ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "CAKE_DISABLE_JIT", "CAKE_JOBS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "the cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
    yield
    loader.release()


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "my op")


def test_a_library_that_calls_the_driver_is_loaded_after_it(kit, tmp_path, monkeypatch):
    record = {"library": "tiny", "arch": ARCH, "sources": ["tiny.cu"], "link": ["cuda"]}
    package = write_package(tmp_path / "driver", [record])
    exposed = []
    monkeypatch.setattr(toolchain, "expose_driver", exposed.append)
    assert loader.load_from(package, "tiny", arch=ARCH).answer() == 42
    assert exposed == ["tiny"]


def ensure(root):
    package = build.read_package(root)
    return loader.ensure(package, package.records[0])


def no_toolkit(monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir(exist_ok=True)
    monkeypatch.delenv("CAKE_NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(toolchain, "_wheel_nvccs", list)


def leftovers():
    return sorted(path.name for path in (cache.folder() / "tmp").iterdir())


# ---- the ordinary way


def test_build_once_then_find(kit, package):
    first = ensure(package)
    second = ensure(package)
    assert first.path == second.path
    assert len(kit.compiles) == 1
    assert first.path.parent == cache.folder() / "libraries"
    assert first.path.name == f"tiny-{first.meta['build_key'][:16]}"
    assert (first.path / "csrc" / "tiny.cu").read_text() == "// tiny\n"
    assert leftovers() == []


def test_meta_says_how_it_was_built(kit, package):
    meta = json.loads((ensure(package).path / "meta.json").read_text())
    assert meta["nvcc"]["version"] == "13.0.88"
    assert meta["command"][0] == str(kit.nvcc)
    assert meta["command"][1:3] == ["-ccbin", str(toolchain.host_compiler())]
    assert meta["arch"] == ARCH
    assert meta["functions"] == ["answer"]
    assert meta["tvm_ffi"] == build.tvm_ffi_version()
    assert meta["library_size"] == (ensure(package).library).stat().st_size


def test_a_published_folder_can_be_read_by_others(kit, package):
    entry = ensure(package)
    assert stat.S_IMODE(entry.path.stat().st_mode) & 0o055 == 0o055


def test_load_calls_and_remembers(kit, package):
    module = loader.load_from(package, "tiny", arch="9.0")
    assert module.answer() == 42


def test_load_of_an_op(kit, monkeypatch, tmp_path):
    write_package(tmp_path / "path" / "synthetic_op")
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    op = OpSpec("synthetic", "none", kernel_packages=(KernelPackage("own", "synthetic_op"),))
    module = loader.load(op, "tiny", arch="9.0a")
    assert module.answer() == 42
    assert loader.load(op, "tiny", arch=ARCH) is module
    (info,) = loader.loaded()
    assert (info.op, info.library, info.arch, info.package, info.nvcc) == (
        "synthetic",
        "tiny",
        ARCH,
        "own",
        "13.0.88",
    )
    begin = time.perf_counter()
    for _ in range(1000):
        loader.load(op, "tiny", arch=ARCH)
    assert (time.perf_counter() - begin) / 1000 < 50e-6
    loader.release()
    assert loader.loaded() == ()
    assert len(kit.compiles) == 1
    with pytest.raises(ValueError, match="synthetic has no library 'big'; it has tiny"):
        loader.load(op, "big", arch=ARCH)
    with pytest.raises(NotImplementedError, match=r"tiny has no build for sm_100a; it has them for sm_90a"):
        loader.load(op, "tiny", arch="10.0")
    with pytest.raises(
        NotImplementedError, match=r"synthetic has no kernels for sm_80; it has them for sm_90a"
    ):
        loader.libraries(op, "8.0")
    doubled = OpSpec(
        "twice",
        "none",
        kernel_packages=(KernelPackage("a", "synthetic_op"), KernelPackage("b", "synthetic_op")),
    )
    with pytest.raises(BuildError, match="two kernel packages have a library 'tiny' for sm_90a: a, b"):
        loader.load(doubled, "tiny", arch=ARCH)


def test_load_from_an_unknown_library(package):
    with pytest.raises(ValueError, match=r"no library 'big' for sm_90a; it has tiny \(sm_90a\)"):
        loader.load_from(package, "big", arch=ARCH)


def test_a_promised_function_that_is_missing(kit, tmp_path):
    record = {"library": "tiny", "arch": ARCH, "sources": ["tiny.cu"], "functions": ["answer", "question"]}
    with pytest.raises(BuildError, match="tiny exports no function question, which build"):
        loader.load_from(write_package(tmp_path / "op", [record]), "tiny", arch=ARCH)


def test_a_changed_source_with_an_old_time_stamp_is_built_anew(kit, package):
    first = ensure(package)
    source = package / "tiny.cu"
    before = source.stat()
    source.write_text("// tIny\n")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))
    second = ensure(package)
    assert second.path != first.path
    assert second.library.read_bytes() != first.library.read_bytes()
    assert len(kit.compiles) == 2
    source.write_text("// tiny\n")
    assert ensure(package).path == first.path
    assert len(kit.compiles) == 2


def test_another_nvcc_is_another_build(kit, package):
    first = ensure(package)
    kit.plan(version="13.1.20")
    second = ensure(package)
    assert second.path != first.path
    assert second.meta["source_key"] == first.meta["source_key"]


def test_flag_variables_do_not_reach_the_compiler(kit, package, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    ensure(package)


# ---- failures of the compile


def test_a_failed_compile_shows_command_message_and_kept_source(kit, package):
    kit.plan(status=2, output="tiny.cu(7): error: expected a ';'")
    with pytest.raises(BuildError) as caught:
        ensure(package)
    error = caught.value
    assert "tiny for sm_90a (exit status 2)" in str(error)
    assert "tiny.cu(7): error: expected a ';'" in str(error)
    assert error.output.strip() == "tiny.cu(7): error: expected a ';'"
    assert error.command in str(error)
    source = Path(error.source)
    assert shlex.split(error.command)[:4] == ["cd", str(source.parent.parent), "&&", str(kit.nvcc)]
    assert source.read_text() == "// tiny\n"
    assert source.is_relative_to(cache.folder() / "failed")
    assert str(source) in str(error)
    assert leftovers() == []
    assert cache.entries() == []
    with pytest.raises(BuildError):  # a second failure replaces what the first one kept
        ensure(package)
    assert len(list((cache.folder() / "failed").iterdir())) == 1
    kit.plan(status=0)
    ensure(package)


def test_a_killed_compiler(kit, package):
    kit.nvcc.write_text(kit.nvcc.read_text().replace("exec", 'case "$*" in *.cu*) kill -9 $$;; esac\nexec'))
    with pytest.raises(BuildError, match=r"\(signal 9\)"):
        ensure(package)


def test_a_compiler_that_leaves_nothing(kit, package, tmp_path):
    kit.nvcc.write_text(kit.nvcc.read_text().replace("exec", 'case "$*" in *.cu*) exit 0;; esac\nexec'))
    with pytest.raises(BuildError, match="left no library"):
        ensure(package)


@pytest.mark.parametrize(
    "output",
    [
        "ptxas info : Compiling entry function '_Z3runv' for 'sm_90a'\n"
        "ptxas info : Function properties for _Z3runv\n"
        "    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n",
        "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function '_Z3runv'\n",
    ],
)
def test_spills_and_serialized_wgmma_fail_the_build_unless_allowed(kit, tmp_path, output):
    kit.plan(output=output)
    with pytest.raises(BuildError, match=r"(?s)compiled, but not as it must.*_Z3runv") as caught:
        ensure(write_package(tmp_path / "op"))
    assert caught.value.output == output + "\n"
    assert cache.entries() == []
    record = {"library": "tiny", "arch": ARCH, "sources": ["tiny.cu"], "functions": ["answer"]}
    allow = {"spills": ["run"], "serialized": ["run"]}
    entry = ensure(write_package(tmp_path / "op", [{**record, "allow": allow}]))
    assert entry.meta["remarks"]


def test_too_old_nvcc_and_no_host_compiler_are_told_before_anything_is_written(
    kit, package, monkeypatch, tmp_path
):
    kit.plan(version="12.0.140")
    raises_soon(ToolchainError, lambda: ensure(package), match=r"sm_90a needs CUDA 12\.3 or newer")
    kit.plan(version="13.0.88")
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'nothing'}")
    raises_soon(ToolchainError, lambda: ensure(package), match=r"g\+\+")
    assert not cache.folder().exists()
    assert kit.compiles == []


def test_a_driver_older_than_the_compiler_is_told_before_the_compile(kit, package, monkeypatch):
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (12, 8))
    with pytest.raises(ToolchainError, match="needs a driver for CUDA 13"):
        loader.load_from(package, "tiny", arch=ARCH)
    assert kit.compiles == []
    ensure(package)  # a prebuild is for any machine
    with pytest.raises(ToolchainError, match="needs a driver for CUDA 13"):
        loader.load_from(package, "tiny", arch=ARCH)


# ---- without a compiler


def test_without_nvcc_one_error_names_everything(package, monkeypatch, tmp_path):
    no_toolkit(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    text = str(raises_soon(ToolchainError, lambda: ensure(package)))
    for part in (
        "tiny for sm_90a",
        str(cache.folder()),
        f"CUDA_HOME={tmp_path}",
        "PATH",
        "pip install 'cake-core[nvcc]'",
    ):
        assert part in text
    assert not cache.folder().exists()


def test_a_prebuilt_cache_needs_no_nvcc(kit, package, monkeypatch, tmp_path):
    entry = ensure(package)
    no_toolkit(monkeypatch, tmp_path)
    assert ensure(package).path == entry.path
    assert loader.load_from(package, "tiny", arch=ARCH).answer() == 42
    (package / "tiny.cu").write_text("// other sources\n")
    with pytest.raises(ToolchainError, match="no nvcc"):
        ensure(package)


def test_a_cache_moved_to_another_place_works(kit, package, monkeypatch, tmp_path):
    ensure(package)
    cache.folder().rename(tmp_path / "moved cache")
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "moved cache"))
    no_toolkit(monkeypatch, tmp_path)
    assert loader.load_from(package, "tiny", arch=ARCH).answer() == 42


def test_of_several_builds_the_newest_nvcc_wins_whatever_the_order(kit, package, monkeypatch):
    for version in ("13.0.88", "13.10.1", "13.9.99"):
        kit.plan(version=version)
        ensure(package)
    monkeypatch.setenv("CAKE_DISABLE_JIT", "1")
    assert ensure(package).meta["nvcc"]["version"] == "13.10.1"


def test_disabled_jit(kit, package, monkeypatch):
    monkeypatch.setenv("CAKE_DISABLE_JIT", "1")
    with pytest.raises(
        NoBuildError, match=r"tiny for sm_90a is not in the cache .* and CAKE_DISABLE_JIT is set"
    ):
        ensure(package)
    monkeypatch.setenv("CAKE_DISABLE_JIT", "0")
    entry = ensure(package)
    monkeypatch.setenv("CAKE_DISABLE_JIT", "1")
    kit.plan(version="13.1.20")  # another nvcc is installed here: no reason to refuse what was prebuilt
    assert ensure(package).path == entry.path


def test_no_build(kit, package):
    with loader.no_build():
        with loader.no_build():
            pass
        with pytest.raises(NoBuildError, match=r"tiny .*no_build\(\) is in force"):
            ensure(package)
    ensure(package)
    with loader.no_build():
        ensure(package)
        kit.plan(version="13.1.20")
        with pytest.raises(NoBuildError):
            ensure(package)
    assert len(kit.compiles) == 1


# ---- damaged, read-only and full caches


def damage(entry, how):
    library = entry.library
    if how == "truncated":
        library.write_bytes(library.read_bytes()[:1000])
    elif how == "empty":
        library.write_bytes(b"")
    elif how == "doctored":
        data = bytearray(library.read_bytes())
        data[len(data) // 2] ^= 1
        library.write_bytes(data)
    elif how == "no library":
        library.unlink()
    elif how == "no meta":
        (entry.path / "meta.json").unlink()
    elif how == "half a meta":
        (entry.path / "meta.json").write_text((entry.path / "meta.json").read_text()[:40])
    elif how == "meta of another kind":
        (entry.path / "meta.json").write_text("[]")
    elif how == "no file at all":
        for path in sorted(entry.path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


DAMAGES = (
    "truncated",
    "empty",
    "doctored",
    "no library",
    "no meta",
    "half a meta",
    "meta of another kind",
    "no file at all",
)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_is_built_again(kit, package, how):
    entry = ensure(package)
    good = entry.library.read_bytes()
    damage(entry, how)
    (listed,) = cache.entries()
    assert listed[1] is None
    assert listed[2]
    assert ensure(package).library.read_bytes() == good
    assert len(kit.compiles) == 2
    assert leftovers() == []
    assert loader.load_from(package, "tiny", arch=ARCH).answer() == 42


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_never_used_without_nvcc(kit, package, monkeypatch, how):
    damage(ensure(package), how)
    monkeypatch.setenv("CAKE_DISABLE_JIT", "1")
    with pytest.raises(NoBuildError, match=r"\(damaged: tiny-\w{16}: "):
        ensure(package)


def as_somebody_who_cannot_write(action):
    """Run ``action`` in a child that may only read, and return what it printed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:  # permissions don't bind root
                os.setgid(65534)
                os.setuid(65534)
            os.write(write, str(action()).encode())
            status = 0
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def shared(monkeypatch):
    """A cache, toolkit and package below a folder that every user may read."""
    importlib.import_module("filelock")  # before the child loses the right to read where it is installed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        kit = FakeToolkit(folder / "kit")
        monkeypatch.setenv("CAKE_NVCC", str(kit.nvcc))
        monkeypatch.setenv("CAKE_CACHE_DIR", str(folder / "cache"))
        toolchain.find_nvcc()  # its version is known, so that the child needn't run it
        yield kit, write_package(folder / "op")
        subprocess.run(["chmod", "-R", "u+w", name], check=True)


def read_only(folder):
    subprocess.run(["chmod", "-R", "a-w,a+rX", str(folder)], check=True)


def test_a_complete_read_only_cache_works(shared):
    kit, package = shared
    entry = ensure(package)
    read_only(cache.folder())
    assert as_somebody_who_cannot_write(lambda: ensure(package).path) == str(entry.path)
    assert len(kit.compiles) == 1


@pytest.mark.parametrize("exists", [True, False])
def test_an_empty_read_only_cache_is_a_clear_error(shared, exists):
    kit, package = shared
    if exists:
        cache.folder().mkdir()
        read_only(cache.folder())
    else:
        cache.folder().parent.chmod(0o555)
    text = as_somebody_who_cannot_write(lambda: ensure(package))
    cache.folder().parent.chmod(0o755)
    assert text.startswith("ReadOnlyError: tiny is not in the cache")
    assert str(cache.folder()) in text
    assert "cannot be written to (Permission denied)" in text
    assert "CAKE_CACHE_DIR" in text
    assert kit.compiles == []


def test_a_read_only_cache_with_another_nvccs_build_is_used_and_says_so(shared):
    kit, package = shared
    entry = ensure(package)
    read_only(cache.folder())
    kit.plan(version="13.1.20")
    toolchain.find_nvcc()
    said = []

    def action():
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("cake").addHandler(handler)
        return f"{ensure(package).path} {said}"

    text = as_somebody_who_cannot_write(action)
    assert text.startswith(str(entry.path))
    assert "as nvcc 13.0.88 built it" in text


def test_a_damaged_library_in_a_read_only_cache_is_a_clear_error(shared):
    kit, package = shared
    damage(ensure(package), "truncated")
    read_only(cache.folder())
    text = as_somebody_who_cannot_write(lambda: ensure(package))
    assert text.startswith("ReadOnlyError: tiny is not in")
    assert "the library has 1000 bytes" in text
    assert len(kit.compiles) == 1


def test_a_cache_that_is_a_file(kit, package):
    cache.folder().write_text("")
    with pytest.raises(BuildError, match=r"the cache .* is unusable \((Not a directory|File exists)\)"):
        ensure(package)


def test_a_disk_that_fills_up_while_compiling(kit, package):
    kit.plan(full_disk=True)
    with pytest.raises(BuildError, match="No space left on device"):
        ensure(package)
    assert leftovers() == []
    assert cache.entries() == []
    assert not (cache.folder() / "failed").exists()
    kit.plan(full_disk=False)
    ensure(package)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_disk_that_fills_up_while_publishing(kit, package, monkeypatch, nth):
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        BuildError,
        match=r"no space left in the cache .* while building tiny; free some, or set CAKE_CACHE_DIR",
    ):
        ensure(package)
    assert leftovers() == []
    assert cache.entries() == []
    monkeypatch.undo()


FULL_DISK = """
import os, pathlib, sys
from cake.core import build, cache, loader
package = build.read_package(sys.argv[1])
disk, said = cache.folder().parent, set()
for kib in range(0, 72, 2):
    cache.clear()
    (disk / "fill").unlink(missing_ok=True)
    try:
        (disk / "fill").write_bytes(bytes(kib << 10))
        loader.ensure(package, package.records[0])
        said.add("built")
    except OSError:
        said.add("filled")
    except Exception as error:
        assert "o space left" in str(error), error
        said.add(type(error).__name__)
        assert [why for _, _, why in cache.entries()] == [], "something half-written is left"
    assert list((disk / "cache" / "tmp").glob("*")) == [], "a build folder is left"
print(sorted(said))
"""


def test_a_disk_that_really_fills_up(kit, package, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=72k none "$0" && exec "$@"', str(disk)]
    try:
        able = subprocess.run([*mount, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs the right to mount a small disk")
    done = subprocess.run(
        [*mount, sys.executable, "-c", FULL_DISK, str(package)],
        env={**os.environ, "CAKE_CACHE_DIR": str(disk / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "BuildError" in done.stdout
    assert "built" in done.stdout


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CAKE_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert cache.folder() == tmp_path / "xdg" / "cake"
    monkeypatch.setenv("CAKE_CACHE_DIR", "relative")
    assert cache.folder() == Path.cwd() / "relative"
    assert not cache.folder().exists()


def test_clear(kit, tmp_path):
    for name in ("one", "two"):
        record = {"library": name, "arch": ARCH, "sources": ["tiny.cu"]}
        ensure(write_package(tmp_path / name, [record]))
    old = cache.folder() / "tmp" / "one-0123456789abcdef.left"
    old.mkdir()
    os.utime(old, (1, 1))
    (cache.folder() / "tmp" / "one-0123456789abcdef.young").mkdir()
    count, size = cache.clear("one")
    assert count == 1
    assert size > 1000
    assert [entry.meta["library"] for _, entry, _ in cache.entries()] == ["two"]
    assert old.exists()
    assert cache.clear()[0] == 1
    assert cache.entries() == []
    assert leftovers() == ["one-0123456789abcdef.young"]
    assert cache.clear() == (0, 0)
