"""Shrinking: smaller in every size, the same in structure, and every change is told."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import BatchError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.verify import shrink as room
from weft.verify.request import VerifyRequest
from weft.verify.shrink import shrink
from weft.verify.worker import run_request

ONE, CUT = Plan(), Plan.from_tables({"mesh": {"dp_shard": 3}, "pipeline": {"microbatches": 2}})
VOCABULARY = 257


def run_of(kind: str, config: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    return RunSpec.from_tables({"model": {"type": kind, "config": config}, **sections})


def test_widths_and_heads_shrink_alike_and_each_change_is_told() -> None:
    small, changes = shrink(RunSpec.default(), ONE, vocab_size=VOCABULARY)
    assert small.model.config == {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    assert set(changes) == {
        "num_hidden_layers 6 -> 2", "hidden_size 256 -> 64", "intermediate_size 768 -> 192",
        "num_attention_heads 8 -> 2", "num_key_value_heads 4 -> 1", "sequence_length 256 -> 32",
    }  # fmt: skip


def test_the_ratio_of_heads_stays_when_the_key_value_heads_are_few() -> None:
    config = {"hidden_size": 768, "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 2}
    small, _ = shrink(run_of("llama", {**config, "num_hidden_layers": 2}), ONE, vocab_size=VOCABULARY)
    given = small.model.config
    assert (given["num_attention_heads"], given["num_key_value_heads"], given["hidden_size"]) == (6, 1, 384)


@pytest.mark.parametrize(("tp", "heads"), [(1, (2, 1)), (2, (4, 2)), (4, (8, 4)), (8, (8, 4)), (3, (2, 1))])
def test_heads_stay_even_over_tensor_parallel_ranks(tp: int, heads: tuple[int, int]) -> None:
    """8 heads, 4 key-value heads: of a degree that does not divide them, nothing is asked."""
    small, _ = shrink(RunSpec.default(), Plan.from_tables({"mesh": {"tp": tp}}), vocab_size=VOCABULARY)
    config = build_config(small.model, vocab_size=VOCABULARY)
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert small.data.sequence_length % tp == 0


def test_every_kind_of_layer_stays() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = {"num_hidden_layers": 4, "layer_types": kinds, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small, changes = shrink(run_of("gemma2", {**config, **heads}), ONE, vocab_size=VOCABULARY)
    assert small.model.config["num_hidden_layers"] == 3
    assert small.model.config["layer_types"] == kinds[:3]
    assert "num_hidden_layers 4 -> 3" in changes
    assert "layer_types: the first 3 of 4" in changes


def test_ties_stay() -> None:
    config = {
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    small, _ = shrink(run_of("qwen3", config), ONE, vocab_size=VOCABULARY)
    model = build_skeleton(build_config(small.model, vocab_size=VOCABULARY))
    assert describe(model).ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.config.head_dim == 32


def test_experts_become_few_but_remain_a_choice() -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 16, "num_experts_per_tok": 3,
    }  # fmt: skip
    small, changes = shrink(run_of("mixtral", config), ONE, vocab_size=VOCABULARY)
    assert small.model.config["num_local_experts"] == 6
    assert "num_local_experts 16 -> 6" in changes


def test_groups_of_experts_stay_equal() -> None:
    """DeepSeek's router chooses 2 of 4 groups first, by two experts of each."""
    sizes = {
        "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 32, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    small, _ = shrink(run_of("deepseek_v3", sizes), ONE, vocab_size=VOCABULARY)
    assert small.model.config["n_routed_experts"] == 8


def test_rows_stay_divisible_by_the_plan() -> None:
    run = RunSpec.default().model_copy(
        update={"train": RunSpec.default().train.model_copy(update={"global_batch": 96})}
    )
    small, changes = shrink(run, CUT, vocab_size=VOCABULARY)
    assert small.train.global_batch == 12
    assert "global_batch 96 -> 12" in changes


def test_what_is_small_stays_as_it_is() -> None:
    tables = shrink(RunSpec.default(), ONE, vocab_size=VOCABULARY)[0]
    again, changes = shrink(tables, ONE, vocab_size=VOCABULARY)
    assert changes == []
    assert again.model.config == tables.model.config


def test_a_width_the_family_refuses_is_taken_back_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_builds", lambda run, **_: run.model.config["hidden_size"] >= 128)
    small, changes = shrink(RunSpec.default(), ONE, vocab_size=VOCABULARY)
    assert small.model.config["hidden_size"] == 128
    assert "hidden_size 256 -> 128" in changes


def test_a_family_that_refuses_everything_keeps_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_builds", lambda *_, **__: False)
    small, changes = shrink(RunSpec.default(), ONE, vocab_size=VOCABULARY)
    assert small.model == RunSpec.default().model
    assert changes == ["sequence_length 256 -> 32"]


def test_shrinking_does_not_make_an_illegal_batch_legal() -> None:
    run = RunSpec.default().model_copy(update={"train": RunSpec.default().train.model_copy(update={"global_batch": 9})})
    plan = Plan.from_tables({"pipeline": {"microbatches": 2}})
    with pytest.raises(BatchError):
        run_request(VerifyRequest(run=run, plans=[plan]))


@pytest.mark.parametrize(("family", "key"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_a_learned_table_of_positions_is_as_long_as_the_rows(family: str, key: str) -> None:
    """So the last position is trained. Rotary models have no such table, and keep what their angles follow from."""
    small, changes = shrink(run_of(family, {}), ONE, vocab_size=VOCABULARY)
    assert small.model.config[key] == small.data.sequence_length == 32
    assert any(change.startswith(f"{key} ") and change.endswith(" -> 32") for change in changes)
    assert key not in shrink(run_of("llama", {}), ONE, vocab_size=VOCABULARY)[0].model.config
