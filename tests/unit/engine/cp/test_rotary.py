"""Rotary embeddings that follow the longest position of a forward: parts of rows get the tables of whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core.plan import ContextParallel
from weft.core.run_spec import ModelSpec
from weft.engine.cp.context import CPContext
from weft.engine.mesh import ContextGroups
from weft.engine.wrap_forward import wrap_own_forward
from weft.models.build import build_config, build_on_meta
from weft.models.positions import rotaries_that_follow

LENGTH, ORIGINAL = 32, 20
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, "factor": 2.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
MODELS = {
    "longrope": ModelSpec(
        type="phi3",
        config={
            **SIZES, "pad_token_id": 0, "original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE,
        },
    ),
    "dynamic": ModelSpec(
        type="llama",
        config={
            **SIZES, "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
}  # fmt: skip


def rotary_of(kind: str) -> nn.Module:
    (rotary,) = rotaries_that_follow(build_on_meta(build_config(MODELS[kind], vocab_size=64)))
    return rotary


def tables(rotary: nn.Module, positions: Tensor) -> list[Tensor]:
    return list(rotary(torch.zeros(1, 1, 32), positions))


def context_of(monkeypatch: pytest.MonkeyPatch, rank: int) -> CPContext:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _group: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda _group: rank)
    groups = ContextGroups(None, None, None)  # type: ignore[arg-type]
    return CPContext(ContextParallel(split="contiguous"), groups, inner="sdpa", multiple=1, masks_in_pieces=False)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("given", [False, True])
def test_a_part_of_a_row_has_the_tables_of_the_whole_row(
    kind: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(LENGTH)[None]
    expected, alone = tables(rotary_of(kind), whole), tables(rotary_of(kind), whole[:, : LENGTH // 2])
    for rank in (0, 1):
        context, rotary = context_of(monkeypatch, rank), rotary_of(kind)
        wrap_own_forward(rotary, context.rotary)
        batch = {"input_ids": whole, "labels": whole, **({"position_ids": whole} if given else {})}
        own = context.rows_of(batch)["position_ids"]
        part = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
        for right, found in zip(expected, tables(rotary, own), strict=True):
            assert torch.equal(found, right[:, part])
    assert not torch.allclose(alone[0], expected[0][:, : LENGTH // 2])  # else the test would show nothing


def test_other_rotaries_are_left_alone() -> None:
    plain = build_on_meta(build_config(ModelSpec(type="llama", config=SIZES), vocab_size=64))
    assert list(rotaries_that_follow(plain)) == []
    by_layer: Any = nn.Module()
    by_layer.inner = nn.Module()
    by_layer.inner.rope_type = {"full": "longrope", "sliding": "default"}
    assert list(rotaries_that_follow(by_layer)) == [by_layer.inner]
