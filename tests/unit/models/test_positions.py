"""Positions of a model: rows beyond its table are refused before ranks start, rows beyond its rotary scaling noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import ModelError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.build import build_config
from weft.models.positions import note_on_positions, rotary_limit
from weft.plan.legality import require_legal

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip


def run_of(kind: str, config: dict[str, Any], length: int, **data: Any) -> RunSpec:
    tables = {
        "model": {"type": kind, "config": config},
        "data": {"sequence_length": length, **data},
        "train": {"global_batch": 4},
    }
    return RunSpec.from_tables(tables)


@pytest.mark.parametrize(
    ("kind", "config"), [("gpt2", {**GPT2, "n_positions": 16}), ("ctrl", {**GPT2, "n_positions": 16})]
)
def test_rows_longer_than_a_table_are_refused(kind: str, config: dict[str, Any]) -> None:
    """CTRL's table is a buffer of sines."""
    require_legal(Plan(), run_of(kind, config, 16))
    with pytest.raises(ModelError, match="longer than the 16 positions") as caught:
        require_legal(Plan(), run_of(kind, config, 17))
    assert "n_positions = 17" in caught.value.hint


def test_a_default_table_counts_too() -> None:
    with pytest.raises(ModelError, match="longer than the 1,024 positions"):
        require_legal(Plan(), run_of("gpt2", GPT2, 1025))


def test_a_folder_s_table_sets_the_length_of_rows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **GPT2, "n_positions": 16}))
    run = RunSpec.from_tables({"model": {"path": str(tmp_path)}, "data": {"sequence_length": 32, "tokenizer": "bytes"}})
    with pytest.raises(ModelError, match="longer than the 16 positions") as caught:
        require_legal(Plan(), run)
    assert "data.sequence_length = 16" in caught.value.hint


def test_rotary_positions_are_noted_not_refused() -> None:
    run = run_of("llama", LLAMA, 128)
    require_legal(Plan(), run)
    assert "beyond the 64 of the model's config" in note_on_positions(run, build_config(run.model, vocab_size=64))
    short = run_of("llama", LLAMA, 64)
    assert note_on_positions(short, build_config(short.model, vocab_size=64)) == ""


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
            64,
        ),
    ],
)  # fmt: skip
def test_scaled_rotaries_reach_further(rope: dict[str, Any], limit: int) -> None:
    config = build_config(run_of("llama", {**LLAMA, "rope_parameters": rope}, 16).model, vocab_size=64)
    assert rotary_limit(config) == limit
    assert rotary_limit(build_config(run_of("gpt2", GPT2, 16).model, vocab_size=64)) == 0


def test_packed_documents_and_a_table_that_switches_are_refused() -> None:
    config = {**LLAMA, "rope_parameters": LONG, "original_max_position_embeddings": 16, "pad_token_id": 0}
    require_legal(Plan(), run_of("phi3", config, 32))
    require_legal(Plan(), run_of("phi3", config, 16, packing="documents"))
    with pytest.raises(ModelError, match="more than 16 tokens"):
        require_legal(Plan(), run_of("phi3", config, 32, packing="documents"))
