"""What `cake doctor` finds: facts about this machine and process, and what would stop a run."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from . import config, env, provenance, registry
from ._gpu import Driver, query
from .errors import BuildError, CakeError, NoBuildError, ToolchainError
from .settings import SETTINGS
from .spec import OpSpec

__all__ = ["Finding", "Report", "collect"]

TORCH_LEAST = "2.8"


@dataclass(frozen=True)
class Finding:
    """One sentence about a trouble; ``stops`` is whether a run would fail over it."""

    stops: bool
    text: str


@dataclass
class Report:
    """Facts by section, each a list of (name, value), and the findings."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def stop(self, text: str) -> None:
        self.findings.append(Finding(True, text))

    def note(self, text: str) -> None:
        self.findings.append(Finding(False, text))

    @property
    def ok(self) -> bool:
        """Whether nothing would stop a run."""
        return not any(finding.stops for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "sections": {title: dict(rows) for title, rows in self.sections.items()},
        }


def collect() -> Report:
    """Look at everything. Imports torch if it can, and initialises the GPU driver in this process."""
    report = Report()
    driver = query()
    _python(report, driver)
    _machine(report, driver)
    archs = _archs(driver)
    _toolchain(report, archs)
    _cache(report)
    _settings(report)
    _ops(report, archs)
    return report


def _python(report: Report, driver: Driver) -> None:
    rows = report.sections.setdefault("Python", [])
    rows.append(("python", f"{platform.python_version()} at {sys.executable}"))
    rows.append(
        ("cake-core", provenance.distribution_version("cake-core") or "not installed as a distribution")
    )
    rows.append(("torch", _torch(report, driver)))
    rows.append(("apache-tvm-ffi", _tvm_ffi(report)))
    found = _flash_linear_attention(report)
    if found is not None:
        rows.append(("flash-linear-attention", found))


def _flash_linear_attention(report: Report) -> str | None:
    from .fla import FlaError, installed, registered

    version = provenance.distribution_version("fla-core") or provenance.distribution_version(
        "flash-linear-attention"
    )
    if version is None:
        return None
    try:
        installed()
    except FlaError as error:
        return f"{version}: {error}"
    asked = any(row.name == "fla" and (row.value or row.error) for row in config.resolved())
    if registered() or asked:
        return version
    names = ", ".join(f"import cake.{spec.name}.fla" for spec in registry.ops() if spec.fla is not None)
    if names:
        report.note(
            f"flash-linear-attention {version} is installed and runs its own kernels: {names} in a program's "
            f"first lines, or CAKE_FLA=1, has it run cake's"
        )
    return version


def _torch(report: Report, driver: Driver) -> str:
    try:
        torch = import_module("torch")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        report.stop(f"torch can't be imported ({why}): pip install 'torch>={TORCH_LEAST}'")
        return "can't be imported"
    from packaging.version import Version

    built = torch.version.cuda
    if Version(torch.__version__) < Version(TORCH_LEAST):
        report.stop(f"torch {torch.__version__} is too old: cake needs torch>={TORCH_LEAST}")
    if driver.gpus and built is None:
        report.stop(
            f"this machine has a GPU and torch {torch.__version__} is a build without CUDA: calls on the GPU "
            f"can't run; install a CUDA build of torch"
        )
    elif driver.gpus and driver.cuda is not None and int(built.split(".")[0]) > driver.cuda[0]:
        report.stop(
            f"torch is built for CUDA {built} and the driver serves CUDA {driver.cuda[0]}.{driver.cuda[1]}: "
            f"update the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    return f"{torch.__version__} ({f'CUDA {built}' if built else 'without CUDA'})"


def _tvm_ffi(report: Report) -> str:
    try:
        import_module("tvm_ffi")
    except Exception as error:
        report.stop(f"tvm_ffi can't be imported ({type(error).__name__}: {error}): no kernel can be loaded")
        return "can't be imported"
    return provenance.distribution_version("apache-tvm-ffi") or "?"


def _machine(report: Report, driver: Driver) -> None:
    rows = report.sections.setdefault("GPU", [])
    rows.append(("driver", f"serves CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else "none"))
    for index, gpu in enumerate(driver.gpus):
        capability = ".".join(map(str, gpu.capability))
        rows.append(
            (f"cuda:{index}", f"{gpu.name}, capability {capability}, {gpu.total_bytes / 2**30:.0f} GiB")
        )
    if not driver.gpus:
        rows.append(("devices", "none"))
        report.note(f"no GPU ({driver.error}): ops run on CPU tensors, on their reference backend")


def _archs(driver: Driver) -> list[str]:
    from .toolchain import parse_arch

    return sorted({parse_arch("{}.{}".format(*gpu.capability)) for gpu in driver.gpus})


def _toolchain(report: Report, archs: list[str]) -> None:
    from . import toolchain

    rows = report.sections.setdefault("Compiler", [])
    try:
        nvcc = toolchain.find_nvcc()
    except ToolchainError as error:
        rows.append(("nvcc", "none"))
        report.note(f"{error}; only libraries that are in the cache already can run")
    else:
        rows.append(("nvcc", f"{nvcc.version} at {nvcc.path}, found through {nvcc.how}"))
        rows += [("passed over", note) for note in nvcc.notes if "unset" not in note]
        for arch in archs:
            try:
                toolchain.check_arch(nvcc, arch)
                toolchain.check_driver(nvcc.version, "what nvcc builds")
            except ToolchainError as error:
                report.note(str(error))
    try:
        rows.append(("host compiler", str(toolchain.host_compiler())))
    except ToolchainError as error:
        rows.append(("host compiler", "none"))
        report.note(str(error))


def _writable(folder: Path) -> bool:
    """Whether ``folder`` can be written to or created, judged without trying."""
    for path in (folder, *folder.parents):
        if path.exists():
            return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    return False


def _cache(report: Report) -> None:
    from . import cache

    rows = report.sections.setdefault("Cache", [])
    try:
        folder = cache.folder()
    except CakeError as error:
        rows.append(("folder", f"can't be told: {error}"))
        return
    found = cache.entries()
    whole = [entry for _, entry, _ in found if entry is not None]
    rows.append(("folder", str(folder)))
    damaged = len(found) - len(whole)
    rows.append(("libraries", f"{len(whole)}, {damaged} damaged" if damaged else f"{len(whole)}"))
    if _writable(folder):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        rows.append(("free space", f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB"))
    else:
        rows.append(("writable", "no"))
        report.note(f"the cache {folder} can't be written to: libraries that it lacks can't be built")
    more = cache.folders()[1:]
    if more:
        rows.append(("read-only folders", ", ".join(map(str, more))))
    for gone in (path for path in more if not path.is_dir()):
        report.note(f"the read-only cache {gone} does not exist (cache_readonly_dirs)")


def _effective(name: str) -> str:
    """What a setting that nobody set comes to on this machine."""
    from . import cache, toolchain

    if name == "cache_dir":
        return str(cache.folder())
    if name == "jobs":
        return str(toolchain.jobs())
    return "unset"


def _fla(report: Report, row: config.Row) -> None:
    from .fla import FlaError, installed

    try:
        installed()
    except FlaError as error:
        report.stop(f"fla is on ({row.source}): {error}")


def _arch_list(report: Report, row: config.Row) -> None:
    from .toolchain import parse_arch_list

    try:
        parse_arch_list(row.value)
    except ValueError as error:
        report.stop(f"cuda_arch_list ({row.source}): {error}")


def _settings(report: Report) -> None:
    rows = report.sections.setdefault("Configuration", [])
    rows.append(("configured", "yes" if config.configured() else "no: every op runs det"))
    winners: dict[str, str] = {}
    for row in config.resolved():
        winners[row.name] = row.source
        if row.error is not None:
            rows.append((row.name, f"not usable: {row.error}"))
            # A setting of core is in everyone's way; an op's variant only in an unconfigured caller's.
            report.findings.append(Finding(row.name in SETTINGS, row.error))
            continue
        if row.name == "cuda_arch_list" and row.value is not None:
            _arch_list(report, row)
        text = _effective(row.name) if row.value is None else str(row.value)
        rows.append((row.name, f"{text} ({row.source})"))
        if row.name == "fla" and row.value:
            _fla(report, row)
    for name, demand in config.requirements().items():
        rows.append(
            (f"{name}.require", demand if isinstance(demand, str) else "the kernels of a saved manifest")
        )
    readers = {variable: s.name for s in SETTINGS.values() for variable in s.variables}
    variables = report.sections.setdefault("Environment", [])
    for variable in env.VARIABLES:
        value = env.get(variable.name)
        source = winners.get(readers.get(variable.name, ""), "")
        if value is None:
            variables.append((variable.name, f"unset: {variable.default}"))
        elif source and not source.startswith("environment"):
            variables.append((variable.name, f"{value} (not used: {source} wins)"))
        elif source and source != f"environment {variable.name}" and source != "environment":
            variables.append((variable.name, f"{value} (not used: {source.split()[1]} wins)"))
        else:
            variables.append((variable.name, value))


def _ops(report: Report, archs: list[str]) -> None:
    rows = report.sections.setdefault("Ops", [])
    for spec in registry.ops():
        version = provenance.op_version(spec) or "?"
        rows.append((spec.name, f"{spec.distribution} {version}: {', '.join(spec.variants)}"))
        for package in spec.kernel_packages:
            record = provenance.package_record(package)
            if record["error"] is not None:
                text = f"op {spec.name!r}: kernel package {package.name!r} can't be read: {record['error']}"
                report.findings.append(Finding(bool(archs), text))  # on a CPU nothing reads it
                break
        else:
            rows += [(f"{spec.name} on {arch}", _kernels(report, spec, arch)) for arch in archs]
    for name, error in registry.broken().items():
        rows.append((name, "its declaration can't be used"))
        report.stop(f"op {name!r} is installed and can't be used: {type(error).__name__}: {error}")
    if not rows:
        rows.append(("none", "try: pip install cake-gdn"))
        report.note("no op is installed: pip install cake-gdn")


def _kernels(report: Report, spec: OpSpec, arch: str) -> str:
    """Whether the op's libraries for ``arch`` are in the cache, or could be built when they are needed."""
    from . import loader, toolchain

    if not spec.kernel_packages:
        return "has no kernels"
    try:
        records = loader.libraries(spec, arch)
    except NotImplementedError as error:
        report.stop(f"{error}: calls on this GPU can't run")
        return "no kernels for this architecture"
    missing: list[str] = []
    with loader.no_build():
        for package, record in records:
            try:
                loader.ensure(package, record, run_here=True)
            except (NoBuildError, ToolchainError, BuildError):
                missing.append(record.library)
    if not missing:
        return "all libraries are in the cache"
    try:
        if config.setting("disable_jit").value:
            raise NoBuildError("CAKE_DISABLE_JIT forbids compiling")
        nvcc = toolchain.find_nvcc()
        toolchain.check_arch(nvcc, arch)
        toolchain.check_driver(nvcc.version, "what it builds")
        toolchain.host_compiler()
    except CakeError as error:
        report.stop(f"op {spec.name!r} needs {', '.join(missing)} for {arch}, not in the cache, and {error}")
        return f"{len(missing)} of {len(records)} libraries are missing and can't be built"
    count = f"{len(missing)} of {len(records)} libraries"
    return f"{count} will be built on first use (or: cake prebuild {spec.name})"
