"""Frozen copies of kernel sources inside an op: made from a git commit, checked by the ids of their bytes.

An op may not run CUDA that another distribution ships, so what ops share lives in the repository's
``kernels/`` and each op carries a copy; third-party kernels come in the same way::

    src/cake/<op>/_vendor/
        VENDORED.json            package -> source, commit, path, and the git blob id of every file
        NOTICE                   says not to edit here
        cake/include/cake/*.cuh  the package "cake": kernels/include
        <name>/*                 further packages, one level deep: none carries copies of its own
        <name>/VENDORED.txt      where it comes from

A blob id is the sha1 that git gives a file's bytes. It outlives a squash or a rebase, and checking it needs
no history and no git; the commit says where to look for the reasons.

Sources: ``self`` (this repository's ``kernels/``), ``fi`` (FlashInfer's Cake packages) and ``miles-pr``
(sources that a pull request generated). docs/vendoring.md shows each.
"""

from ._check import check, check_folder, check_module
from ._copy import Copied, Wanted, remove, vendor_fi, vendor_self
from ._merge import install_merge, merge
from ._miles import Generated, vendor_miles_pr
from ._table import (
    DEVICE_LIBRARY,
    FOLDER,
    NOTICE,
    PACKAGE_NOTICE,
    SOURCES,
    TABLE,
    VendorError,
    blob_id,
    parse_table,
    read_table,
)
from ._upstream import check_upstream
from ._where import known_ops, module_folder, repository

__all__ = [
    "DEVICE_LIBRARY",
    "FOLDER",
    "NOTICE",
    "PACKAGE_NOTICE",
    "SOURCES",
    "TABLE",
    "Copied",
    "Generated",
    "VendorError",
    "Wanted",
    "blob_id",
    "check",
    "check_folder",
    "check_module",
    "check_upstream",
    "install_merge",
    "known_ops",
    "merge",
    "module_folder",
    "parse_table",
    "read_table",
    "remove",
    "repository",
    "vendor_fi",
    "vendor_miles_pr",
    "vendor_self",
]
