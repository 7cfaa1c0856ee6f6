"""Every example is run as its README says, in a copy of its folder; the table of examples has all of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from blocks import ROOT, Story, command_lines, read_blocks

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/README.md"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / name, tmp_path / name)
    story = Story(tmp_path / name)
    try:
        for block in read_blocks(f"examples/{name}/README.md"):
            if block.info == "bash":
                for line in command_lines(block):
                    story.run(line, where=block.where)
    finally:
        story.close()


def test_the_table_has_every_example() -> None:
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    linked = set(re.findall(r"\]\(([\w-]+)/README\.md\)", (ROOT / "examples" / "README.md").read_text()))
    assert linked == folders == set(EXAMPLES)
