"""What runs on which architecture: said before anybody builds for it, and before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass

from cake.core import build, registry, toolchain
from cake.core.errors import ToolchainError

__all__ = ["OTHERWISE", "Served", "compiler", "served"]

OTHERWISE = (
    "Where there are no kernels, CPU tensors run the reference backend, and a call that needs one on a GPU "
    "raises NotImplementedError before anything is launched. An architecture is served once a kernel package "
    "that has it is vendored and declared (docs/vendoring.md)."
)


@dataclass(frozen=True)
class Served:
    """What an op has for an architecture.

    Args:
        op, arch: which.
        packages: (kernel package, its libraries) of those that have any for ``arch``.
        lacking: the op's other kernel packages.
        elsewhere: the architectures that the op has kernels for.
    """

    op: str
    arch: str
    packages: tuple[tuple[str, tuple[str, ...]], ...]
    lacking: tuple[str, ...]
    elsewhere: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What is served. ``OTHERWISE`` says what becomes of what isn't."""
        if not self.packages:
            known = ", ".join(self.elsewhere) or "no architecture"
            return f"{self.op} has no kernels for {self.arch}; it has them for {known}"
        has = "; ".join(f"{name} ({', '.join(libraries)})" for name, libraries in self.packages)
        lacks = f"; no kernels of {', '.join(self.lacking)}" if self.lacking else ""
        return f"{self.op} on {self.arch}: {has}{lacks}"


def served(op: str, arch: str) -> Served:
    """What an installed op has for ``arch``.

    Raises:
        UnknownOpError: no such op.
        BuildError: a ``build.json`` is wrong.
    """
    exact = toolchain.parse_arch(arch)
    have, lack, every = [], [], set()
    for package in registry.op_spec(op).kernel_packages:
        records = build.read_package(package).records
        every |= {record.arch for record in records}
        libraries = tuple(record.library for record in records if record.arch == exact)
        if libraries:
            have.append((package.name, libraries))
        else:
            lack.append(package.name)
    return Served(op, exact, tuple(have), tuple(lack), tuple(sorted(every)))


def compiler(arch: str) -> str:
    """Which compiler an architecture needs, and whether this machine has it."""
    least = toolchain.MIN_CUDA.get(arch)
    needs = f"{arch} needs CUDA {least[0]}.{least[1]} or newer" if least else f"{arch} is unknown to cake"
    try:
        nvcc = toolchain.find_nvcc()
        toolchain.check_arch(nvcc, arch)
    except ToolchainError as error:
        return str(error) if str(error).startswith(needs) else f"{needs}, and this machine has no nvcc"
    return f"{needs}: nvcc {nvcc.version} here (from {nvcc.how})"
