"""Many builders of one library: one compile where locks work, and never half a library where they don't."""

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import filelock
import pytest

from cake.core import build, cache, loader, toolchain
from cake.core.testing.toolchain import write_package

DRIVER = r"""
import contextlib, ctypes, fcntl, multiprocessing, os, pathlib, sys
import filelock
from cake.core import build, cache, loader

count, mode = int(sys.argv[1]), sys.argv[2]
packages = [build.read_package(root) for root in sys.argv[3:]]
barrier = multiprocessing.get_context("fork").Barrier(count)
if mode == "flock does nothing":
    fcntl.flock = lambda descriptor, how: None
elif mode == "flock fails":
    def flock(descriptor, how):
        raise OSError(37, os.strerror(37))
    fcntl.flock = flock
elif mode == "no lock":
    def acquire(self, *args, **kwargs):
        raise NotImplementedError
    filelock.FileLock.acquire = acquire

children = []
for index in range(count):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            barrier.wait()
            for package in packages:
                entry = loader.ensure(package, package.records[0])
                try:
                    data = entry.library.read_bytes()
                except FileNotFoundError:  # replaced by another who saw it damaged: look again, as load does
                    entry = loader.ensure(package, package.records[0])
                    data = entry.library.read_bytes()
                assert len(data) == entry.meta["library_size"], "half a library"
                ctypes.CDLL(str(entry.library)).__tvm_ffi_answer
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(status)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "CAKE_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "the cache"))
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "op")


def read(root):
    package = build.read_package(root)
    return package, package.records[0]


def ensure(root):
    return loader.ensure(*read(root))


def race(count, mode, *packages):
    command = [sys.executable, "-c", DRIVER, str(count), mode, *map(str, packages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def leftovers():
    return sorted(path.name for path in (cache.folder() / "tmp").iterdir())


def test_sixteen_cold_builders_compile_each_library_once(kit, tmp_path):
    kit.plan(seconds=0.5)
    records = [[{"library": name, "arch": "sm_90a", "sources": ["tiny.cu"]}] for name in ("one", "two")]
    packages = [write_package(tmp_path / str(i), record) for i, record in enumerate(records)]
    race(16, "locks work", *packages)
    assert sorted(c["args"][-1] for c in kit.compiles) == ["one.so", "two.so"]
    assert leftovers() == []
    assert [why for _, _, why in cache.entries()] == ["", ""]


def test_of_many_waiting_builders_one_fails_and_all_say_why(kit, package):
    kit.plan(seconds=1.5, status=1, output="tiny.cu(1): error: no")
    command = [sys.executable, "-c", DRIVER, "8", "locks work", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 8
    assert done.stdout.count("tiny.cu(1): error: no") == 8
    assert done.stdout.count("in another process, which this one waited for") == 7
    assert len(kit.compiles) == 1
    kit.plan(seconds=0, status=0)
    ensure(package)  # a failure is no verdict on the next try


@pytest.mark.parametrize("mode", ["flock does nothing", "flock fails", "no lock"])
def test_without_working_locks_everybody_gets_a_whole_library(kit, package, mode):
    kit.plan(seconds=0.3)
    race(6, mode, package)
    assert 1 <= len(kit.compiles) <= 6
    assert leftovers() == []
    ((_, entry, why),) = cache.entries()
    assert entry is not None, why


def test_without_locks_a_damaged_entry_is_replaced_whole(kit, package):
    entry = ensure(package)
    entry.library.write_bytes(b"half")
    said = race(6, "no lock", package)
    assert "the library has 4 bytes" in said
    assert ensure(package).library.stat().st_size == entry.meta["library_size"]
    assert leftovers() == []


def test_a_builder_that_is_killed_leaves_nothing_in_the_way(kit, package):
    kit.plan(seconds=30)
    command = [sys.executable, "-c", DRIVER, "1", "locks work", str(package)]
    builder = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 30
    while not kit.compiles and time.monotonic() < deadline:
        time.sleep(0.02)
    (compile,) = kit.compiles
    time.sleep(0.2)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    os.kill(compile["pid"], signal.SIGKILL)
    assert [name for name in leftovers() if name.startswith("tiny-")], (
        "the builder was killed before it began"
    )
    assert cache.entries() == []
    kit.plan(seconds=0)
    begin = time.monotonic()
    entry = ensure(package)
    assert time.monotonic() - begin < 10
    assert entry.library.stat().st_size == entry.meta["library_size"]
    (left,) = leftovers()  # young, so it may be another node's
    old = time.time() - 2 * cache.STALE_SECONDS
    os.utime(cache.folder() / "tmp" / left, (old, old))
    (package / "tiny.cu").write_text("// another\n")
    ensure(package)
    assert leftovers() == []


def test_a_lock_that_nobody_gives_back_only_costs_time(kit, package, monkeypatch):
    ensure(package)
    (lock,) = (cache.folder() / "locks").iterdir()
    cache.clear()
    monkeypatch.setattr(cache, "LOCK_SECONDS", 2.5)
    with filelock.FileLock(lock):
        begin = time.monotonic()
        ensure(package)
        assert 2 < time.monotonic() - begin < 15


def test_who_waits_for_a_lock_takes_what_is_published_meanwhile(kit, package, monkeypatch):
    entry = ensure(package)
    (lock,) = (cache.folder() / "locks").iterdir()
    find, asked = cache.find, []

    def miss_twice(library, key):
        asked.append(key)
        return None if len(asked) <= 2 else find(library, key)

    monkeypatch.setattr(cache, "find", miss_twice)
    with filelock.FileLock(lock):
        assert ensure(package).path == entry.path
    assert len(kit.compiles) == 1


def test_a_lock_file_left_behind_means_nothing(kit, package):
    name = ensure(package).path.name
    cache.clear()
    lock = cache.folder() / "locks" / f"{name}.lock"
    lock.write_text("12345\nsomehost\n")
    lock.chmod(0o444)
    ensure(package)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTEMPTY])
def test_the_loser_of_a_rename_uses_the_winners_entry(kit, package, monkeypatch, code):
    winner = ensure(package)
    monkeypatch.setattr(cache, "find", lambda library, key: None)  # as if it had been published just now
    assert ensure(package).path == winner.path
    assert len(kit.compiles) == 2
    assert leftovers() == []


def test_a_winner_that_cannot_be_seen_yet(kit, package, monkeypatch):
    """On a network file system the loser may be told EEXIST while the winner's folder isn't visible to it."""
    rename, failures = Path.rename, []

    def refuse(self, target):
        if Path(target).parent.name == "libraries" and len(failures) < 3:
            failures.append(target)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    entry = ensure(package)
    assert len(failures) == 3
    assert entry.library.exists()
    assert leftovers() == []


def test_a_rename_that_worked_although_it_says_not(kit, package, monkeypatch):
    """A repeated network request finds the source gone, since the first one had moved it."""
    rename = Path.rename

    def twice(self, target):
        result = rename(self, target)
        if Path(target).parent.name == "libraries":
            rename(self, target)
        return result

    monkeypatch.setattr(Path, "rename", twice)
    entry = ensure(package)
    assert entry.library.exists()
    assert len(kit.compiles) == 1


def test_an_entry_that_vanishes_before_it_is_loaded_is_built_again(kit, package, monkeypatch):
    read_package, record = read(package)
    gone = loader.ensure(read_package, record)
    cache.clear()
    real, given = loader.ensure, []

    def stale_once(*args, **kwargs):
        given.append(gone if not given else real(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(loader, "ensure", stale_once)
    assert loader.load_from(package, "tiny", arch="sm_90a").answer() == 42
    assert len(given) == 2
    assert len(kit.compiles) == 2


def test_an_interrupted_build_takes_its_compiler_down(kit, package):
    kit.plan(seconds=60)
    command = [sys.executable, "-c", DRIVER.replace("os.fork()", "0"), "1", "locks work", str(package)]
    # Whoever runs the tests in the background ignores SIGINT, and what it starts would, too.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    builder = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=heed)
    deadline = time.monotonic() + 30
    while not kit.compiles and time.monotonic() < deadline:
        time.sleep(0.02)
    builder.send_signal(signal.SIGINT)
    assert builder.wait(timeout=20) == 1
    (compile,) = kit.compiles
    with pytest.raises(ProcessLookupError):
        os.kill(compile["pid"], 0)
    assert leftovers() == []
