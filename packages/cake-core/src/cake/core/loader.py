"""Loads an op's libraries: from this process, else from the cache, else by building them.

This module owns the state of what the process has loaded; ``release()`` forgets it. Loaded code itself stays
mapped, since kernels of it may still be running.

Which build of the same sources is used:

* with an nvcc, exactly that nvcc's build, made if it isn't there;
* without an nvcc, under CAKE_DISABLE_JIT=1, or where the cache can't be written to: that, else any build of
  exactly the same sources, flags, architecture and tvm-ffi, the newest nvcc's first. So a cache that was
  prebuilt elsewhere works, and so does an imported archive or a folder of CAKE_CACHE_READONLY_DIRS.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cake.core import _compile, build, cache, config, toolchain
from cake.core.errors import BuildError, NoBuildError, ToolchainError
from cake.core.spec import KernelPackage, OpSpec

__all__ = ["Loaded", "ensure", "libraries", "load", "load_from", "loaded", "no_build", "release"]

logger = logging.getLogger("cake.loader")


@dataclass(frozen=True)
class Loaded:
    """One library of this process: where it came from, for the manifest."""

    op: str
    library: str
    arch: str
    package: str
    source_key: str
    nvcc: str
    path: Path


@dataclass
class _State:
    modules: dict[tuple[str, str | None, str, str], Any]  # op, kernel package, library, arch
    info: dict[tuple[str, str, str, str], Loaded]
    ready: dict[tuple[str, Path, str, str], cache.Entry]  # the package's folder in place of its name
    forbidden: int


_state = _State({}, {}, {}, 0)
_lock = threading.RLock()
epoch = 0
"""How often the process has forgotten what it loaded: whoever holds a library asks again in another epoch."""

_count_lock = threading.Lock()


def load(op: str | OpSpec, library: str, *, arch: str, package: str | None = None) -> Any:
    """The tvm-ffi module of one of an op's libraries; its functions are attributes.

    The first call may compile (about a minute per library); later ones are a dictionary lookup.

    Args:
        op: an installed op's name, or a declaration.
        library: a ``library`` of the op's ``build.json``.
        arch: in any spelling that ``toolchain.parse_arch`` takes.
        package: which of the op's kernel packages, where two have a library of that name.

    Raises:
        ValueError: no such library or kernel package.
        NotImplementedError: the op has no kernels for ``arch``.
        NoBuildError: it would have to be built, under ``no_build()`` or CAKE_DISABLE_JIT=1.
        ToolchainError: it would have to be built, and nvcc or the host compiler is missing or too old; or
            the driver is
            too old for the library.
        BuildError: the compile failed, or the library can't be loaded.
    """
    name = op if isinstance(op, str) else op.name
    module = _state.modules.get((name, package, library, arch))
    if module is not None:
        return module
    exact = toolchain.parse_arch(arch)
    with _lock:
        found, source, record = _record(op, library, exact, package)
        key = (name, found, library, exact)
        module = _state.modules.get(key)
        if module is None:
            entry, module = _open(source, record, prebuilt(name, source, record))
            _state.info[key] = Loaded(
                name,
                library,
                exact,
                found,
                str(entry.meta["source_key"]),
                str(entry.meta["nvcc"]["version"]),
                entry.library,
            )
            _state.modules[key] = module
        _state.modules[(name, package, library, arch)] = module
        return module


def load_from(folder: KernelPackage | Path | str, library: str, *, arch: str) -> Any:
    """Like ``load``, for a kernel package that no op declares, such as the test kernels of a header. Not
    remembered.

    Raises:
        ValueError: no such library for ``arch``; else as ``load``.
    """
    package = build.read_package(folder)
    record = package.record(library, toolchain.parse_arch(arch))
    if record is None:
        known = ", ".join(f"{r.library} ({r.arch})" for r in package.records)
        raise ValueError(f"{package.root}/build.json has no library {library!r} for {arch}; it has {known}")
    return _open(package, record, None)[1]


def _open(package: build.Package, record: build.Record, entry: cache.Entry | None) -> tuple[cache.Entry, Any]:
    import tvm_ffi

    if "cuda" in record.link:
        toolchain.expose_driver(record.library)
    for attempt in range(3):
        if entry is None:
            entry = ensure(package, record, run_here=True)
        try:
            module = tvm_ffi.load_module(str(entry.library))
        except Exception as error:
            if not entry.library.exists() and attempt < 2:
                entry = None  # cleared or replaced since it was looked up
                continue
            raise BuildError(
                f"{record.library} can't be loaded ({error}); was it built on a newer system? "
                "`cake cache clear` removes it",
                source=str(entry.library),
            ) from error
        missing = [name for name in record.functions if not module.implements_function(name)]
        if missing:
            raise BuildError(
                f"{record.library} exports no function {', '.join(missing)}, which build.json promises",
                source=str(package.root / "build.json"),
            )
        return entry, module
    raise BuildError(
        f"{record.library} vanished from the cache {cache.folder()} three times while it was being loaded"
    )


def libraries(op: str | OpSpec, arch: str) -> tuple[tuple[build.Package, build.Record], ...]:
    """Every (package, record) of an op for ``arch``.

    Raises:
        NotImplementedError: the op has no kernels for ``arch``; the message lists those it has.
        BuildError: a ``build.json`` is wrong.
    """
    exact = toolchain.parse_arch(arch)
    packages = [package for _, package in _packages(op)]
    found = tuple(
        (package, record) for package in packages for record in package.records if record.arch == exact
    )
    if not found:
        name = op if isinstance(op, str) else op.name
        known = sorted({record.arch for package in packages for record in package.records})
        raise NotImplementedError(
            f"{name} has no kernels for {exact}; it has them for {', '.join(known) or 'no architecture'}"
        )
    return found


def _packages(op: str | OpSpec) -> list[tuple[str, build.Package]]:
    from cake.core import registry

    spec = op if isinstance(op, OpSpec) else registry.op_spec(op)
    return [(package.name, build.read_package(package)) for package in spec.kernel_packages]


def _record(
    op: str | OpSpec, library: str, arch: str, package: str | None
) -> tuple[str, build.Package, build.Record]:
    packages = _packages(op)
    name = op if isinstance(op, str) else op.name
    if package is not None:
        known = ", ".join(declared for declared, _ in packages) or "none"
        packages = [item for item in packages if item[0] == package]
        if not packages:
            raise ValueError(f"{name} declares no kernel package {package!r}; it declares: {known}")
    found = [(name, p, r) for name, p in packages if (r := p.record(library, arch)) is not None]
    if len(found) > 1:
        raise BuildError(
            f"{name}: two kernel packages have a library {library!r} for {arch}: "
            f"{', '.join(f[0] for f in found)}; say which (package=...)"
        )
    if found:
        return found[0]
    records = [r for _, p in packages for r in p.records]
    archs = sorted(r.arch for r in records if r.library == library)
    if archs:
        raise NotImplementedError(
            f"{name}: {library} has no build for {arch}; it has them for {', '.join(archs)}"
        )
    known = ", ".join(sorted({r.library for r in records})) or "none"
    raise ValueError(f"{name} has no library {library!r}; it has {known}")


def ensure(
    package: build.Package,
    record: build.Record,
    *,
    run_here: bool = False,
    on_build: Callable[[], None] | None = None,
) -> cache.Entry:
    """The checked cache entry of a record, built if need be.

    Args:
        on_build: called when this process itself begins to compile.
        run_here: it will run on this machine, so a driver that is too old for it is an error.

    Raises:
        NoBuildError, ToolchainError, BuildError: as ``load``.
    """
    files = build.source_files(package, record)
    source = build.source_key(package, record, files)
    disabled = bool(config.setting("disable_jit").value)
    nvcc, missing = None, None
    if not disabled:
        try:
            nvcc = toolchain.find_nvcc()
        except ToolchainError as error:
            missing = error
    if nvcc is not None:
        key = build.build_key(source, nvcc)
        entry = cache.find(record.library, key)
    else:
        entry = cache.find_any(record.library, source)
    if entry is None:
        what = f"{record.library} for {record.arch}"
        absent = f"{what} is not in {cache.searched()}{cache.damage(record.library)}"
        if disabled or _state.forbidden:
            why = "CAKE_DISABLE_JIT is set" if disabled else "no_build() is in force"
            raise NoBuildError(
                f"{absent} and {why}; build it with "
                f"`cake prebuild <op> --arch {record.arch}`, with the same version of the op"
            )
        if nvcc is None:
            raise ToolchainError(f"{absent} and has to be compiled, but there is {missing}")
        if run_here:
            toolchain.check_driver(nvcc.version, what)
        entry = _make(package, record, files, source, key, _compile.toolkit(nvcc, record.arch), on_build)
    if run_here:
        toolchain.check_driver(str(entry.meta["nvcc"]["version"]), record.library)
    return entry


def _make(
    package: build.Package,
    record: build.Record,
    files: dict[str, bytes],
    source: str,
    key: str,
    tools: _compile.Toolkit,
    on_build: Callable[[], None] | None,
) -> cache.Entry:
    def make(work: Path) -> dict[str, Any]:
        logger.info("building %s for %s with nvcc %s", record.library, record.arch, tools.nvcc.version)
        if on_build is not None:
            on_build()
        return {**_compile.compile_record(package, record, tools, work), "source_key": source}

    try:
        return cache.publish(record.library, key, files, make)
    except cache.ReadOnlyError:
        other = cache.find_any(record.library, source)
        if other is None:
            raise
        logger.warning(
            "using %s as nvcc %s built it: the cache %s can't be written to, and this machine's nvcc is %s",
            record.library,
            other.meta["nvcc"]["version"],
            cache.folder(),
            tools.nvcc.version,
        )
        return other


@contextlib.contextmanager
def no_build() -> Iterator[None]:
    """A context in which building a library raises NoBuildError, in every thread of the process."""
    with _count_lock:  # not _lock, which a build in another thread may hold for a minute
        _state.forbidden += 1
    try:
        yield
    finally:
        with _count_lock:
            _state.forbidden -= 1


def remember(op: str, package: build.Package, record: build.Record, entry: cache.Entry) -> None:
    """Note what prebuild made, so that ``load`` takes it without looking again, until ``release()``."""
    with _lock:
        _state.ready[(op, package.root, record.library, record.arch)] = entry


def prebuilt(op: str, package: build.Package, record: build.Record) -> cache.Entry | None:
    """The entry that this process has prebuilt for the record since the last ``release()``, if any."""
    return _state.ready.get((op, package.root, record.library, record.arch))


def forget_prebuilt() -> None:
    """Forget what prebuild made; what is loaded stays so."""
    with _lock:
        _state.ready.clear()


def loaded() -> tuple[Loaded, ...]:
    """What this process has loaded for ops, in that order."""
    return tuple(_state.info.values())


def release() -> None:
    """Forget what was loaded and prebuilt: the next use looks at sources and cache again."""
    global epoch
    with _lock:
        _state.modules.clear()
        _state.info.clear()
        _state.ready.clear()
        epoch += 1
