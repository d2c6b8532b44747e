"""Puts a new ``_vendor`` in the place of the old one: as a whole, checked, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._check import check_module, interrupted
from ._table import FOLDER, NOTICE, NOTICE_TEXT, TABLE, VendorError, read_table, table_text

__all__ = ["current", "place"]


def current(module: Path) -> dict[str, Any]:
    """The table of an op that is about to get a new one, after mending what a killed copy has left.

    Raises:
        VendorError: it can't be read.
    """
    folder = module / FOLDER
    for left in interrupted(folder):
        if "-old-" in left.name and not folder.exists():
            left.rename(folder)  # it was killed between the two renames
        else:
            shutil.rmtree(left, ignore_errors=True)
    return read_table(folder)


def place(module: Path, table: Mapping[str, Any], contents: Mapping[str, bytes]) -> None:
    """Write ``_vendor`` of an op anew and swap it in; an empty table takes it away.

    Args:
        module: the folder of the op's module.
        table: all packages that the op carries from now on.
        contents: ``<package>/<file>`` -> bytes, of every package that is written; the others of ``table``
            stay as they are.

    Raises:
        VendorError: it can't be written, or ``check`` would complain of something that it didn't complain of
            before. The folder is as it was then.
    """
    folder = module / FOLDER
    known = set(check_module(module))
    new = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-new-", dir=module))
    old = new.with_name(new.name.replace("-new-", "-old-"))
    existed, placed = folder.exists(), False
    try:
        new.chmod(0o755)
        _write(new, folder, table, contents)
        if existed:
            folder.rename(old)
        try:
            if table:
                new.rename(folder)
                placed = True
            found = [sentence for sentence in check_module(module) if str(old) not in sentence]
            worse = [sentence for sentence in found if sentence not in known]
            if worse:
                raise VendorError("\n  ".join(["this can't be, so everything is as it was:", *worse]))
        except BaseException:
            if placed:
                shutil.rmtree(folder, ignore_errors=True)
            if existed:
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise VendorError(
            f"{folder} could not be replaced ({error.strerror or error}); it is as it was"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(new: Path, folder: Path, table: Mapping[str, Any], contents: Mapping[str, bytes]) -> None:
    fresh = {name.split("/", 1)[0] for name in contents}
    for name in set(table) - fresh:
        if (folder / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(folder / name, new / name, symlinks=True, ignore=skip)
    for name, data in contents.items():
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).write_bytes(data)
    (new / NOTICE).write_text(NOTICE_TEXT, encoding="utf-8")
    (new / TABLE).write_text(table_text(table), encoding="utf-8")
