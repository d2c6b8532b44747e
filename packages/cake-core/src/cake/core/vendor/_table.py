"""``VENDORED.json``: what it may say, and how it is written. Everything else reads it through here."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cake.core.errors import CakeError

SCHEMA = 1
FOLDER = "_vendor"
TABLE = "VENDORED.json"
NOTICE = "NOTICE"
NOTICE_TEXT = (
    "Frozen copies, made by `cake vendor` and listed in VENDORED.json. Change the source, not these.\n"
)
PACKAGE_NOTICE = "VENDORED.txt"
"""The notice in each package's folder: where the copy comes from."""
SOURCES = ("self", "fi", "miles-pr")
DEVICE_LIBRARY = "cake"
"""The package that holds ``kernels/include``; every op with kernels carries it."""

_PACKAGE = re.compile(r"[a-z][a-z0-9_]*\Z")
_HEX = re.compile(r"[0-9a-f]{40}\Z")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_FIELDS = {"source", "commit", "path", "files"}
_MORE = {"added", "allow", "module", "options"}
_ALLOW = {"imports", "environment"}


class VendorError(CakeError, RuntimeError):
    """A copy that can't be made, or a table of copies that can't be read."""


def blob_id(data: bytes) -> str:
    """The id that git gives a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def check_name(name: str) -> str:
    """``name`` if a package may be called so.

    Raises:
        VendorError: it isn't a lower-case identifier.
    """
    if not _PACKAGE.match(name):
        raise VendorError(f"a package must be a lower-case identifier, got {name!r}")
    return name


def plain(name: str) -> bool:
    """Whether ``name`` is a relative path that stays where it is, as in a table."""
    return (
        bool(name) and posixpath.normpath(name) == name and not name.startswith(("/", "../")) and name != ".."
    )


def read_table(folder: Path) -> dict[str, Any]:
    """The packages of ``VENDORED.json``; empty where there is none.

    Raises:
        VendorError: it isn't JSON, or a field is wrong.
    """
    path = folder / TABLE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise VendorError(f"{path} can't be read: {error}") from error
    return parse_table(text, str(path))


def parse_table(text: str, where: str) -> dict[str, Any]:
    """The packages of a table's text.

    Raises:
        VendorError: it isn't JSON, or a field is wrong; the message begins with ``where``.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise VendorError(f"{where} can't be read: {error}") from error
    if (
        not isinstance(data, dict)
        or data.get("schema") != SCHEMA
        or not isinstance(data.get("packages"), dict)
    ):
        raise VendorError(f"{where} must be an object with schema {SCHEMA} and packages")
    for name, package in data["packages"].items():
        wrong = _wrong_package(name, package)
        if wrong:
            raise VendorError(f"{where}: package {name!r} {wrong}")
    return dict(data["packages"])


def table_text(table: Mapping[str, Any]) -> str:
    """The text of a table, the same for the same packages."""
    return json.dumps({"schema": SCHEMA, "packages": dict(sorted(table.items()))}, indent=2) + "\n"


def notice_text(package: Mapping[str, Any]) -> str:
    """The text of ``VENDORED.txt``: a function of the table, so that it can't say anything else."""
    lines = [
        "Frozen copy, made by `cake vendor` and listed in ../VENDORED.json. Change the source, not this.",
        f"source: {package['source']}",
        f"path:   {package['path']}",
        f"commit: {package['commit']}",
        *(f"not from there: {name}" for name in package.get("added", ())),
    ]
    return "\n".join(lines) + "\n"


def upstream_files(package: Mapping[str, Any]) -> dict[str, str]:
    """The files that are byte for byte those of the recorded commit: name -> blob id."""
    ours = {PACKAGE_NOTICE, *package.get("added", ())}
    return {name: blob for name, blob in package["files"].items() if name not in ours}


def _wrong_package(name: str, package: Any) -> str:
    if not _PACKAGE.match(name):
        return "must be a lower-case identifier"
    if not isinstance(package, dict) or not _FIELDS <= set(package) <= _FIELDS | _MORE:
        return f"must have the fields {', '.join(sorted(_FIELDS))}, and may have {', '.join(sorted(_MORE))}"
    if package["source"] not in SOURCES or not isinstance(package["path"], str):
        return f"must have a source of {', '.join(SOURCES)} and a text for path"
    if not isinstance(package["commit"], str) or not _HEX.match(package["commit"]):
        return f"must name a commit by 40 hex digits, got {package['commit']!r}"
    files = package["files"]
    if not isinstance(files, dict) or not files:
        return "must list at least one file"
    for file, blob in files.items():
        if not plain(file):
            return f"lists {file!r}, which is no plain path"
        if FOLDER in file.split("/") or posixpath.basename(file) == TABLE:
            return f"lists {file!r}: copies are one level deep, so a package can't carry copies of its own"
        if not isinstance(blob, str) or not _HEX.match(blob):
            return f"must give {file} a blob id of 40 hex digits, got {blob!r}"
    return _wrong_more(package)


def _wrong_more(package: Mapping[str, Any]) -> str:
    if package["source"] != "self" and PACKAGE_NOTICE not in package["files"]:
        return f"must list its notice {PACKAGE_NOTICE}"
    added = package.get("added", [])
    if not _texts(added) or set(added) - set(package["files"]):
        return f"must add files that it lists, got {added!r}"
    module = package.get("module", "m")
    if not isinstance(module, str) or not _MODULE.match(module):
        return f"must name its module by identifiers and dots, got {module!r}"
    allow = package.get("allow", {})
    if not isinstance(allow, dict) or set(allow) - _ALLOW or not all(_texts(v) for v in allow.values()):
        return f"may allow {' and '.join(sorted(_ALLOW))}, each a list of texts, got {allow!r}"
    if not isinstance(package.get("options", {}), dict):
        return f"must have an object of options, got {package['options']!r}"
    return ""


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
