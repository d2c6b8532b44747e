"""Where ops are: in a checkout, or where they are installed."""

from __future__ import annotations

import os
from pathlib import Path

from ._table import VendorError


def repository(start: Path | None = None) -> Path | None:
    """The checkout around ``start`` (the working directory by default): the folder with
    ``packages/cake-*/src``."""
    here = (start or Path.cwd()).absolute()
    for folder in (here, *here.parents):
        if any(folder.glob("packages/cake-*/src")):
            return folder
    return None


def module_folder(op: str, repo: Path | None = None) -> Path:
    """The folder of an op's module: in the checkout if there is one, else where it is installed.

    Raises:
        VendorError: the checkout has no such op.
        UnknownOpError: no checkout, and no such op is installed.
    """
    if repo is not None:
        found = repo / "packages" / f"cake-{op}" / "src" / "cake" / op
        if not found.is_dir():
            known = ", ".join(_ops_of(repo)) or "none"
            raise VendorError(
                f"{repo} has no op {op!r} (no folder {found.relative_to(repo)}); it has: {known}"
            )
        return found
    from cake.core import registry

    packages = registry.op_spec(op).kernel_packages
    if not packages:
        raise VendorError(f"op {op!r} declares no kernel package, so it has no folder to look in")
    package = packages[0]
    return Path(os.path.normpath(package.root() / Path(*[".."] * len(Path(package.path).parts))))


def known_ops(repo: Path | None) -> list[str]:
    """The ops of a checkout, or those that are installed and have kernels."""
    if repo is not None:
        return _ops_of(repo)
    from cake.core import registry

    return [spec.name for spec in registry.ops() if spec.kernel_packages]


def _ops_of(repo: Path) -> list[str]:
    found = (path.name[5:] for path in (repo / "packages").glob("cake-*") if path.name != "cake-core")
    return sorted(op for op in found if (repo / "packages" / f"cake-{op}" / "src" / "cake" / op).is_dir())
