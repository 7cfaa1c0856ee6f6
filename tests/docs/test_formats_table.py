"""The tables of formats have the figures of `weft plan --explain precision` and `weft inference`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT
from typer.testing import CliRunner

from weft.cli.main import app

TEXT = (ROOT / "docs" / "guides" / "formats.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Rows of the table in a section, without its head."""
    section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [line.split(" | ") for line in lines[2:]]


def answer(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


TRAINING = rows("Training: bytes per parameter")
WEIGHTS = rows("Inference: weights")
CACHES = rows("Inference: key-value cache per token")


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: row[0])
def test_a_row_of_training(row: list[str], tmp_path: Path) -> None:
    model, preset, *printed = row
    plan = tmp_path / "plan.toml"  # of eight devices, whether it fits or not: a search would take longer
    tables = "mesh.dp_shard = 8\ndata_parallel.zero = 3\n"
    plan.write_text(f'{tables}precision.preset = "{preset}"\n', encoding="utf-8")
    options = ("--devices", "8xH200", "--plan", str(plan), "--explain", "precision")
    found = answer("plan", model, *options)["precision"]
    formats = {one["component"]: one["format"] for one in found}
    at_rest = sum(one["bytes_per_parameter"] for one in found if one["is_at_rest"])
    assert formats["first_moment"] == formats["second_moment"]
    names = ("weights", "products", "gradients", "master_weights", "first_moment")
    assert printed == [*(formats[name] for name in names), f"{at_rest:g}", formats["reduce"]]


def inference(model: str, *options: str) -> Any:
    return answer("inference", model, "--devices", "1xH200", "--context", "4096", *options)["inference"]


@pytest.mark.parametrize("row", WEIGHTS, ids=lambda row: row[0])
def test_a_row_of_weights(row: list[str]) -> None:
    model, *printed = row

    def size(weights: str) -> str:
        return f"{inference(model, '--weights', weights)['memory']['terms']['weights'] / 1e9:.2f} GB"

    assert printed == [size("bf16"), size("int8"), size("int4")]
    assert size("fp8") == size("int8")


@pytest.mark.parametrize("row", CACHES, ids=lambda row: row[0])
def test_a_row_of_caches(row: list[str]) -> None:
    model, factors, *printed = row
    per_token = 1
    for factor in factors.split(" x "):
        per_token *= int(factor)

    def sizes(kind: str) -> str:
        found = inference(model, "--kv-cache", kind)
        scales = found["kv_cache_scale_bytes_per_token"]
        return f"{found['kv_cache_bytes_per_token']}" + (f" (+{scales})" if scales else "")

    assert printed == [sizes("bf16"), sizes("int8"), sizes("int4")]
    assert sizes("fp8") == sizes("int8")
    assert printed[0] == str(2 * per_token)


def test_the_tables_have_the_models_of_the_field() -> None:
    families = ("llama", "qwen3", "deepseek", "mistral", "gemma")
    for table in (TRAINING, WEIGHTS, CACHES):
        assert all(any(row[0].startswith(family) for row in table) for family in families)
