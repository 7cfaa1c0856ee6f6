"""The page for users of other systems names keys that exist, and counts the lines of the examples as they are."""

from __future__ import annotations

import re

from blocks import ROOT

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec

PAGE = (ROOT / "docs/guides/migrate.md").read_text(encoding="utf-8")
JOBS = {"pretrain, sharded": "pretrain", "fine-tune on chats": "sft", "DPO": "dpo", "long rows": "long-context"}


def test_every_key_exists() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    named = {key for row in rows for key in re.findall(r"`(\w+\.\w+)(?: = [^`]*)?`", row.split(" | ")[-1])}
    assert len(named) > 30
    sections = {**RunSpec.model_fields, **Plan.model_fields}
    for key in named:
        section, name = key.split(".")
        assert name in sections[section].annotation.model_fields, key


def test_lines_of_the_examples_are_counted() -> None:
    for job, folder in JOBS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {job}"))
        lines = [line for file in (ROOT / "examples" / folder).glob("*.toml") for line in file.read_text().splitlines()]
        written = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert int(row.rstrip(" |").rsplit("| ", 1)[1]) == len(written), job
