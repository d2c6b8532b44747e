"""Reads vendored sources for what they may not do: import across ops, read the environment."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cake.core._vendored import Copies

__all__ = ["wrong_sources"]

_C_SOURCES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc")
_ENVIRONMENT = ("environ", "environb", "getenv", "getenvb")
_GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(")
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def wrong_sources(folder: Path, module: str, table: Mapping[str, Any]) -> list[str]:
    """What the sources of the packages in ``folder`` do that they may not: file, line and why.

    Args:
        folder: a ``_vendor``.
        module: the op's module, ``cake.gdn``.
        table: its packages.
    """
    copies = Copies.of(module, table)
    wrong = []
    for name, package in sorted(table.items()):
        free = package.get("allow", {}).get("environment", ())
        for file in package["files"]:
            path = folder / name / file
            ending = posixpath.splitext(file)[1]
            if ending not in (".py", *_C_SOURCES) or not path.is_file() or path.is_symlink():
                continue
            text = path.read_bytes().decode("utf-8", errors="replace")
            if ending == ".py":
                found = _python(text, copies, name, file, package["files"], table, file in free)
            else:
                found = iter(()) if file in free else _c(text)
            wrong += [f"{path}:{line}: {why}" for line, why in sorted(found)]
    return wrong


def _c(text: str) -> Iterator[tuple[int, str]]:
    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    source = _COMMENT.sub(blank, text)
    for match in _GETENV.finditer(source):
        yield source.count("\n", 0, match.start()) + 1, _environment("getenv")


def _environment(what: str) -> str:
    return (
        f"reads the environment ({what}), which no call of an op may depend on; to allow it for this file, "
        "vendor the package with --allow-environment and the file's name"
    )


def _python(
    text: str,
    copies: Copies,
    package: str,
    file: str,
    files: Mapping[str, str],
    table: Mapping[str, Any],
    free: bool,
) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        yield getattr(error, "lineno", None) or 1, f"isn't Python that can be read ({error})"
        return
    folder = posixpath.dirname(file)
    system = _names_of(tree, "os", "posix")
    importer = _names_of(tree, "importlib")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _import(copies, package, table, alias.name, (), line)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            absolute = copies.absolute(package, folder, node.module or "", node.level)
            if absolute is None:
                yield line, f"imports {'.' * node.level}{node.module or ''}, which leads out of its upstream"
            else:
                yield from _import(copies, package, table, absolute, names, line)
                if absolute in ("os", "posix") and not free:
                    yield from ((line, _environment(n)) for n in names if n in (*_ENVIRONMENT, "*"))
                if absolute == "importlib" and {"import_module", "*"} & set(names):
                    yield line, "imports by computed names (importlib.import_module), which nobody can check"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in _ENVIRONMENT and node.value.id in system and not free:
                yield line, _environment(f"{node.value.id}.{node.attr}")
            if node.attr == "import_module" and node.value.id in importer:
                yield line, "imports by computed names (importlib.import_module), which nobody can check"
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield line, "imports by computed names (__import__), which nobody can check"


def _names_of(tree: ast.AST, *modules: str) -> set[str]:
    """The names that a module is bound to anywhere in a source."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in modules}
    return found


def _import(
    copies: Copies,
    package: str,
    table: Mapping[str, Any],
    absolute: str,
    names: tuple[str, ...],
    line: int,
) -> Iterator[tuple[int, str]]:
    target = copies.target(absolute)
    if target.package is not None:
        where = target.name.replace(".", "/")
        if where and not _has(table[target.package]["files"], where):
            yield line, f"imports {absolute}, but {target.package} has no {where}.py here"
        return
    # `from .. import sibling` imports no module but what lies below it.
    beyond = [name for name in names if copies.target(f"{absolute}.{name}").package is None]
    if (beyond or not names) and not copies.permitted(package, absolute):
        yield line, copies.refusal(absolute, f"{', '.join(beyond)} from {absolute}" if names else absolute)


def _has(files: Mapping[str, str], where: str) -> bool:
    return f"{where}.py" in files or any(file.startswith(where + "/") for file in files)
