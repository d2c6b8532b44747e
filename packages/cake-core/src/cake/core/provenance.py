"""Which kernels a run uses: the manifest for its log, and the check that refuses others."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from . import config, registry
from .errors import CakeError, ConfigError, ToolchainError
from .spec import KernelPackage, OpSpec

__all__ = [
    "check_requirements",
    "distribution_version",
    "kernel_hash",
    "manifest",
    "op_version",
    "package_record",
]

SCHEMA = 1
_HASH = re.compile(r"(?:sha256:)?([0-9a-fA-F]{12,64})\Z")


def distribution_version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def op_version(spec: OpSpec) -> str | None:
    """The version of the distribution that installs the op; None where it isn't installed as one."""
    return distribution_version(spec.distribution)


def package_record(package: KernelPackage) -> dict[str, Any]:
    """What is known of one kernel package: ``content_hash`` ("sha256:…"), ``archs`` and ``error``."""
    from .build import content_hash, read_package

    try:
        archs = sorted({record.arch for record in read_package(package).records})
        return {"content_hash": f"sha256:{content_hash(package)}", "archs": archs, "error": None}
    except (CakeError, OSError) as error:
        return {"content_hash": None, "archs": [], "error": str(error)}


def kernel_hash(spec: OpSpec, records: Mapping[str, Mapping[str, Any]] | None = None) -> str | None:
    """The content hash of all the op's kernels: "sha256:" and 64 digits.

    The hash of its kernel package where it has one; of the names and hashes of all, where it has several.
    None where it has no kernels, or one of its packages can't be read.
    """
    if records is None:
        records = {package.name: package_record(package) for package in spec.kernel_packages}
    hashes = {name: record["content_hash"] for name, record in records.items()}
    if not hashes or None in hashes.values():
        return None
    if len(hashes) == 1:
        return str(next(iter(hashes.values())))
    return f"sha256:{hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()}"


def check_requirements(require: Mapping[str, Any]) -> None:
    """Compare the installed ops with what a run demands.

    Args:
        require: op -> a version specifier (PEP 440, ``">=0.1,<0.2"``) or a content hash (``"sha256:…"`` or
            bare hexadecimal digits, at least the first 12), or the op's entry of a saved manifest, whose
            kernel packages must all have the hashes that they had then.

    Raises:
        UnknownOpError: an op isn't installed.
        ConfigError: an op has another version or other kernels, or a demand is neither form; names both
            sides.
    """
    for name, demand in require.items():
        spec = registry.op_spec(name)
        if isinstance(demand, Mapping):
            _check_packages(spec, demand)
            continue
        if not isinstance(demand, str):
            raise ConfigError(
                f"require[{name!r}] must be a version specifier or a content hash, got {demand!r}"
            )
        match = _HASH.match(demand.strip())
        if match:
            _check_hash(spec, match[1].lower())
        else:
            _check_version(spec, demand)


def _check_hash(spec: OpSpec, wanted: str) -> None:
    records = {package.name: package_record(package) for package in spec.kernel_packages}
    found = kernel_hash(spec, records)
    if found is None:
        errors = [record["error"] for record in records.values() if record["error"]]
        why = errors[0] if errors else "it has no kernel packages"
        raise ConfigError(
            f"op {spec.name!r} must have kernels sha256:{wanted}, and its hash can't be told: {why}"
        )
    if not found.removeprefix("sha256:").startswith(wanted):
        raise ConfigError(
            f"op {spec.name!r} must have kernels sha256:{wanted}, got {found} ({spec.distribution}"
            f" {op_version(spec) or 'of unknown version'}): its results may differ in their bits"
        )


def _check_packages(spec: OpSpec, saved: Mapping[str, Any]) -> None:
    """Compare each kernel package with what a manifest said of it: ``saved`` is the op's entry there."""
    recorded = saved.get("kernel_packages")
    if not isinstance(recorded, Mapping) or not all(isinstance(item, Mapping) for item in recorded.values()):
        raise ConfigError(
            f"require[{spec.name!r}] must be a version specifier, a content hash or the op's entry of a "
            f"saved manifest (with kernel_packages), got an object of {', '.join(map(str, saved)) or 'none'}"
        )
    now = {package.name: package_record(package) for package in spec.kernel_packages}
    differences = []
    for name in sorted({*recorded, *now}):
        wanted = recorded[name].get("content_hash") if name in recorded else "absent"
        found = now[name]["content_hash"] if name in now else "absent"
        if wanted is None or found is None or wanted != found:
            why = now[name]["error"] if name in now and found is None else None
            told = f"can't be told ({why})" if why else found
            differences.append(f"package {name!r} must be {wanted or 'known, but was not'}, got {told}")
    if differences:
        then = saved.get("version") or "of unknown version"
        raise ConfigError(
            f"op {spec.name!r} has other kernels than the saved manifest ({spec.distribution} {then} then, "
            f"{op_version(spec) or 'of unknown version'} now), so its results may differ in their bits: "
            + "; ".join(differences)
        )


def _check_version(spec: OpSpec, demand: str) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        specifier = SpecifierSet(demand)
    except InvalidSpecifier:
        raise ConfigError(
            f"require[{spec.name!r}] must be a version specifier such as '==0.1.*' or a kernel content hash "
            f"such as 'sha256:0123456789ab', got {demand!r}"
        ) from None
    if not demand.strip():
        raise ConfigError(
            f"require[{spec.name!r}] must be a version specifier or a content hash, got {demand!r}"
        )
    found = op_version(spec)
    if found is None:
        raise ConfigError(
            f"op {spec.name!r} must be {spec.distribution}{demand}, and {spec.distribution} isn't installed "
            f"as a distribution, so its version can't be told"
        )
    if not specifier.contains(found, prereleases=True):
        raise ConfigError(
            f"op {spec.name!r} must be {spec.distribution}{demand}, got {spec.distribution} {found}"
        )


def _compiler() -> dict[str, Any]:
    from .toolchain import find_nvcc

    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        return {"path": None, "version": None, "how": None, "error": str(error)}
    return {"path": str(nvcc.path), "version": nvcc.version, "how": nvcc.how, "error": None}


def _device(probe: bool) -> dict[str, Any] | None:
    from .toolchain import parse_arch

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        return {"name": torch.cuda.get_device_name(index), "arch": parse_arch(f"{major}.{minor}")}
    if not probe:
        return None
    from ._gpu import query

    gpus = query().gpus
    if not gpus:
        return None
    return {"name": gpus[0].name, "arch": parse_arch("{}.{}".format(*gpus[0].capability))}


def _vendored(spec: OpSpec) -> dict[str, Any]:
    """The op's VENDORED.json by package: where each frozen copy came from."""
    found: dict[str, Any] = {}
    for package in spec.kernel_packages:
        try:
            module = package.root().parents[len(PurePosixPath(package.path).parts) - 1]
            path = module / "_vendor" / "VENDORED.json"
            recorded = json.loads(path.read_text(encoding="utf-8")).get("packages", {})
        except (OSError, ValueError, AttributeError):
            continue
        for name, entry in recorded.items():
            found[name] = {
                "source": entry.get("source"),
                "commit": entry.get("commit"),
                "content_hash": _copy_hash(path.parent / name, entry.get("files", {})),
            }
    return found


def _copy_hash(folder: Path, files: Mapping[str, Any]) -> str | None:
    """sha256 over the names and bytes of a copy's files, as they are now; None where one can't be read."""
    try:
        found = [[name, hashlib.sha256((folder / name).read_bytes()).hexdigest()] for name in sorted(files)]
    except OSError:
        return None
    return f"sha256:{hashlib.sha256(json.dumps(found).encode()).hexdigest()}"


def _loaded() -> list[dict[str, str]]:
    """The libraries that this process has loaded so far, and the nvcc that built each."""
    loader = sys.modules.get(f"{__package__}.loader")
    if loader is None:
        return []
    return [
        {
            "op": item.op,
            "package": item.package,
            "library": item.library,
            "arch": item.arch,
            "nvcc": item.nvcc,
            "source_key": item.source_key,
        }
        for item in loader.loaded()
    ]


def _demand(demand: Any) -> Any:
    """A requirement as the manifest shows it: of a saved entry, what is compared."""
    if isinstance(demand, str):
        return demand
    packages = demand["kernel_packages"]
    return {"kernel_packages": {n: {"content_hash": p.get("content_hash")} for n, p in packages.items()}}


def manifest(*, probe: bool = False) -> dict[str, Any]:
    """What the bits of a run depend on, ready for ``json.dumps``: log it once at the start of a training run.

    Versions of Python, torch, tvm-ffi, cake-core and each op; per op its variant and options as they would
    run now, the content hash of its kernels, and commit and hash of each vendored copy; nvcc; the GPU and its
    architecture. What can't be told is None, with the reason beside it. Imports nothing and initialises
    nothing on the GPU.

    Args:
        probe: ask the driver for a GPU where torch hasn't initialised one. It initialises the driver in this
            process, so leave it off in a process that forks.
    """
    ops: dict[str, Any] = {}
    rows = {row.name: row for row in config.resolved()}
    for spec in registry.ops():
        packages = {package.name: package_record(package) for package in spec.kernel_packages}
        variant = rows[f"{spec.name}.variant"]
        ops[spec.name] = {
            "distribution": spec.distribution,
            "version": op_version(spec),
            "variant": variant.value,
            "variant_source": variant.source,
            "options": {flag.key: rows[f"{spec.name}.{flag.key}"].value for flag in spec.flags},
            "kernels": kernel_hash(spec, packages),
            "kernel_packages": packages,
            "vendored": _vendored(spec),
        }
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": distribution_version("torch"),
        "apache-tvm-ffi": distribution_version("apache-tvm-ffi"),
        "cake-core": distribution_version("cake-core"),
        "nvcc": _compiler(),
        "device": _device(probe),
        "configured": config.configured(),
        "deterministic": rows["deterministic"].value,
        "workspace_pool_bytes": rows["workspace_pool_bytes"].value,
        "loaded": _loaded(),
        "require": {name: _demand(demand) for name, demand in config.requirements().items()},
        "ops": ops,
        "broken_ops": {name: f"{type(error).__name__}: {error}" for name, error in registry.broken().items()},
    }
