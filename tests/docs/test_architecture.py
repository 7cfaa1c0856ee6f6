"""ARCHITECTURE.md and the concept pages speak of the code as it is: layers, order, files, names."""

from __future__ import annotations

import ast
import re

import pytest
from blocks import ROOT, all_pages

from weft.engine.engine import Engine

SOURCE = ROOT / "src" / "weft"
MAX_LINES = 800
_FILE = re.compile(r"`((?:src/weft/)?[a-z_]+(?:/[a-z_0-9]+)*(?:/|\.py))`")
_METHOD = re.compile(r"`Engine\.(\w+)`")
_TEST = re.compile(r"`(tests/[\w/.]+)`")
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAGES = [page for page in all_pages() if page.startswith(("ARCHITECTURE", "docs/concepts", "docs/log"))]


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_five_files_to_read_first_are_under_800_lines() -> None:
    files = re.findall(r"^\d\. `([^`]+)`", section("Five files to read first"), re.MULTILINE)
    assert len(files) == 5
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) < MAX_LINES


def test_the_layer_table_is_the_one_the_contract_test_enforces() -> None:
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", section("Layers"), re.MULTILINE)
    tree = ast.parse((ROOT / "tests" / "contract" / "test_layers.py").read_text(encoding="utf-8"))
    (levels,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LEVELS"
    ]
    built = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {name: int(level) for level, name in rows} == {name: levels[name] for name in built}


def test_the_order_of_apply_is_that_of_the_code() -> None:
    told = re.findall(r"^\| \d+ \| (\w+) \|", section("The order of apply"), re.MULTILINE)
    docstring = ast.get_docstring(ast.parse((SOURCE / "engine" / "apply.py").read_text(encoding="utf-8"))) or ""
    assert told == re.findall(r"^\d+\. (\w+)", docstring, re.MULTILINE)
    assert told


@pytest.mark.parametrize("page", PAGES)
def test_named_files_methods_and_tests_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in _FILE.findall(text):
        assert (SOURCE / name.removeprefix("src/weft/")).exists() or (ROOT / name).exists(), name
    for name in _METHOD.findall(text):
        assert hasattr(Engine, name), name
    for name in _TEST.findall(text):
        assert (ROOT / name).exists(), name
