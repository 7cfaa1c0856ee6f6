"""What the documentation's scripts use of weft is public: `weft.X` of `weft.__all__`, or a name of a public room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, all_pages, read_blocks

import weft

ROOMS = ("weft", "weft.server")
SCRIPTS = [
    (block.where, block.body) for page in all_pages() for block in read_blocks(page) if block.info.startswith("python")
]
EXAMPLES = [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in ROOT.glob("examples/**/*.py")]
# `weft.Plan.from_file` in a line of prose or a table: the first name counts
_INLINE = re.compile(r"`weft\.([A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*(?:\(|`)")


def public(room: str) -> set[str]:
    module = weft if room == "weft" else getattr(weft, room.removeprefix("weft."))
    return set(module.__all__)


def used(script: str) -> Iterator[tuple[str, str]]:
    """(room, name) of everything that a script takes from weft."""
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name.rpartition(".")[0], alias.name.rpartition(".")[2])
                for alias in node.names
                if alias.name.startswith("weft.")
            )
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node.value)
            if name in ROOMS:
                yield name, node.attr


def not_public(script: str) -> list[str]:
    return [f"{room}.{name}" for room, name in used(script) if room not in ROOMS or name not in public(room)]


@pytest.mark.parametrize(("where", "script"), [*SCRIPTS, *EXAMPLES], ids=lambda value: value.partition("\n")[0][:60])
def test_scripts_take_public_names_only(where: str, script: str) -> None:
    assert not not_public(script), where


def test_there_are_scripts_and_a_private_name_is_seen() -> None:
    assert len(SCRIPTS) >= 5
    assert not_public("from weft.train.ranks.process import join") == ["weft.train.ranks.process.join"]
    assert not_public("import weft\nweft.server.Server\nweft.no_such_name") == ["weft.no_such_name"]


@pytest.mark.parametrize("page", [page for page in all_pages() if page not in ("CHANGELOG.md", "ARCHITECTURE.md")])
def test_names_in_prose_are_public_too(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {name for name in _INLINE.findall(text) if name != "calibration"}  # a file's name
    assert named <= set(weft.__all__), page


def test_the_guide_names_every_public_name() -> None:
    guide = Path(ROOT / "docs/guides/python-api.md").read_text(encoding="utf-8")
    missing = {name for name in weft.__all__ if not name.startswith("__") and f"weft.{name}" not in guide}
    assert not missing - {"dry_run"}  # of the guide of the dry run
