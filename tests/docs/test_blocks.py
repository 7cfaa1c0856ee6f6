"""The fenced blocks are of known kinds, TOML says what a run or a plan may say, and what is not run says why."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from blocks import Block, all_pages, read_blocks

from weft.core.config import sections_of
from weft.core.executable import require_executable
from weft.core.plan import SECTIONS as PLAN_SECTIONS
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.server_spec import ServerRun
from weft.hardware import calibration, catalogue
from weft.launch.places.settings import LaunchSettings

KINDS = {"bash", "bash no-run", "python", "toml", "text"}
BLOCKS = [block for page in all_pages() for block in read_blocks(page)]


def test_there_are_blocks_of_every_kind_and_no_other() -> None:
    assert {block.info for block in BLOCKS} == KINDS


def test_no_fence_is_left_open() -> None:
    for page in all_pages():
        assert sum(block.page == page for block in BLOCKS) * 2 == count_fences(page), page


def count_fences(page: str) -> int:
    from blocks import ROOT

    return sum(line.startswith("```") for line in (ROOT / page).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "toml"], ids=lambda b: b.where)
def test_toml_is_a_run_a_plan_that_this_version_executes_or_hardware(block: Block, tmp_path: Path) -> None:
    tables = tomllib.loads(block.body)
    if set(tables) <= {"version", *PLAN_SECTIONS}:
        require_executable(Plan.from_tables(tables, source=block.where))
    elif set(tables) <= set(sections_of(LaunchSettings)):
        LaunchSettings.from_tables(tables, source=block.where)
    elif "server" in tables:
        ServerRun.from_tables(tables, source=block.where)
    elif "peak_flops" in tables:
        catalogue.check_table("devices", tables, source=block.where, partial=False)
    elif set(tables) <= {"measured", *calibration.KINDS}:
        path = tmp_path / "measured.toml"
        path.write_text(block.body, encoding="utf-8")
        assert any(calibration.read(path).tables.values())
    else:
        RunSpec.from_tables(tables, source=block.where)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "bash no-run"], ids=lambda b: b.where)
def test_what_is_not_run_says_why(block: Block) -> None:
    assert "not run by the tests, since " in block.before.lower(), f"{block.where}: {block.before!r}"
