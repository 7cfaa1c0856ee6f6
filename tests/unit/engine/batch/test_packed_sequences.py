"""A model is told that rows are one document each, instead of reading it off the device; positions are looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.masking_utils as masks
from tiny import build_engine, global_batch

from weft.data.rows import document_positions


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The positions that Hugging Face looked for documents in: the name it calls must be there to be replaced."""
    own, seen = masks.find_packed_sequence_indices, []

    def look(positions: torch.Tensor) -> Any:
        seen.append(positions)
        return own(positions)

    monkeypatch.setattr(masks, "find_packed_sequence_indices", look)
    return seen


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_nothing_is_looked_for_in_rows_without_positions(family: str, looked: list[torch.Tensor]) -> None:
    engine = build_engine(family, {"pipeline": {"microbatches": 2}})
    engine.step(global_batch(0))
    engine.evaluate(global_batch(1))
    assert not looked
    with torch.no_grad():
        engine.model(input_ids=global_batch(0)["input_ids"], use_cache=False)
    assert looked, "Hugging Face looks elsewhere now"


def test_packed_documents_are_still_found(looked: list[torch.Tensor]) -> None:
    batch = dict(global_batch(0))
    batch["input_ids"][:, 7] = 0
    positions = torch.from_numpy(document_positions(batch["input_ids"].numpy(), end_of_document=0))
    apart = build_engine("llama", {}).step({**batch, "position_ids": positions})
    assert looked
    assert apart.loss != build_engine("llama", {}).step(batch).loss
