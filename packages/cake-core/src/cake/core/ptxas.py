"""Reads what ptxas says about each kernel: registers, spills, and remarks that mean a silent loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KernelReport", "complaints", "parse"]

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_CODE = re.compile(r"\((C75\d\d)\)")
_IN_FUNCTION = re.compile(r"function '?([\w$.]+)'?")


@dataclass
class KernelReport:
    """What ptxas reported for one kernel. Sizes in bytes; ``name`` is the mangled symbol."""

    name: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For meta.json."""
        return asdict(self)


def parse(output: str) -> tuple[list[KernelReport], list[tuple[str, str, str]]]:
    """The kernels of an ``-Xptxas -v`` log, and its remarks as (kind, function, line).

    A kind is a code like "C7510" for ptxas's remarks on wgmma and setmaxnreg, "serialized" for one without a
    code, or "spills". ``function`` is the mangled name, empty where the line names none (ptxas prints its
    remarks before it says what it compiles, so their place says nothing).
    """
    kernels: dict[str, KernelReport] = {}
    remarks: list[tuple[str, str, str]] = []
    entry = current = ""
    for line in output.splitlines():
        if match := _ENTRY.search(line):
            entry = current = match.group(1)
            kernels.setdefault(entry, KernelReport(entry))
        elif match := _PROPERTIES.search(line):
            current = match.group(1)
        elif match := _STACK.search(line):
            stack, stores, loads = (int(n) for n in match.groups())
            if current in kernels:
                report = kernels[current]
                report.stack, report.spill_stores, report.spill_loads = stack, stores, loads
            if stores or loads:
                remarks.append(("spills", current, f"{stores} bytes spill stores, {loads} bytes spill loads"))
        elif (match := _USED.search(line)) and entry in kernels:
            kernels[entry].registers = int(match.group(1))
            if smem := _SMEM.search(line):
                kernels[entry].smem = int(smem.group(1))
        elif (code := _CODE.search(line)) or ("wgmma" in line and "serialized" in line):
            where = _IN_FUNCTION.search(line)
            kind = code.group(1) if code else "serialized"
            text = line.partition(" : ")[2].strip() or line.strip()
            remarks.append((kind, where.group(1) if where else "", text))
    return list(kernels.values()), remarks


def complaints(remarks: list[tuple[str, str, str]], allow: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The remarks that no ``allow`` entry of the record covers, one sentence each.

    An entry covers a remark of its kind where one of its names is part of the function's mangled name, and
    "*" covers all of the kind, those that name no function too; "serialized" covers every coded remark that
    says so.
    """
    found = []
    for kind, function, line in remarks:
        names = allow.get(kind, ())
        if "serialized" in line:
            names = (*names, *allow.get("serialized", ()))
        if not any(name == "*" or name in function for name in names):
            found.append(line if not function or function in line else f"{function}: {line}")
    return list(dict.fromkeys(found))
