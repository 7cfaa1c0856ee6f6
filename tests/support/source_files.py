"""The files of `src/weft`, each parsed once per test process: several contract tests read all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import weft

SOURCE = Path(weft.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def package(path: Path) -> str:
    """The package of weft that a file belongs to; "" for files beside the packages."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else ""


def files_of(*packages: str) -> list[Path]:
    return [path for path in FILES if package(path) in packages]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) for every import."""
    tree = parsed(path)
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.module, id(node) in top))
            if node.module == "weft":
                found += [(f"weft.{alias.name}", id(node) in top) for alias in node.names]
    return found
