"""No import cycle between files: a file never reaches itself through imports, at the top or inside a function.

Imports for the type checker alone (`if TYPE_CHECKING:`) run nothing and are left out.
"""

from __future__ import annotations

import ast
from pathlib import Path

from source_files import SOURCE, parsed


def test_there_is_no_import_cycle() -> None:
    assert find_cycles(read_imports(SOURCE)) == []


def test_a_cycle_through_a_function_is_found_and_one_for_types_is_not(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import weft.a\n"
    files = {"a": "import weft.b", "b": "def f():\n    from weft.c import x", "c": "from weft import a", "d": typed}
    for name, text in {**files, "__init__": ""}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    assert find_cycles(read_imports(tmp_path)) == [{"weft.a", "weft.b", "weft.c"}]


def read_imports(source: Path) -> dict[str, set[str]]:
    """Module -> the modules of weft that it imports. `from weft.x import y` is x.y where that is a module."""
    paths = {_module_name(path, source): path for path in source.rglob("*.py")}
    return {name: _imported(parsed(path), set(paths)) - {name} for name, path in paths.items()}


def find_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that reach each other (Tarjan's strongly connected components of more than one)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in imports[module]:
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            group = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(group)

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return groups


def _module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(("weft", *(part for part in parts if part != "__init__")))


def _imported(node: ast.AST, modules: set[str]) -> set[str]:
    """The targets of all imports below `node`, outside `if TYPE_CHECKING:`."""
    found: set[str] = set()
    if isinstance(node, ast.Import):
        found = {alias.name for alias in node.names if alias.name in modules}
    elif isinstance(node, ast.ImportFrom) and node.module:
        named = {f"{node.module}.{alias.name}" for alias in node.names}
        found = (named & modules) or ({node.module} & modules)
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    children = node.orelse if is_for_types and isinstance(node, ast.If) else ast.iter_child_nodes(node)
    # Expressions hold no imports, and they are most of the nodes.
    statements = (child for child in children if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case))
    return found.union(*(_imported(child, modules) for child in statements))
