"""Planner and engine deal the same blocks to the same stages; modules without a known config go by their parameters."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from weft.core.run_spec import ModelSpec
from weft.core.stages import partition_shape
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.pp.costs import count_elements, partition_model, planned_shape
from weft.models.pp.probe import trace_forward
from weft.models.pp.split import split_model
from weft.models.shape.lookup import shape_from_type

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1531,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen3": _SIZES | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_layer": 7, "n_head": 4, "vocab_size": 1531},
    "gemma2": _SIZES | {"head_dim": 16},
    "mixtral": _SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": _SIZES | _EXPERTS | _LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 7,
            "num_attention_heads": 4, "vocab_size": 1531},
    "bloom": {"hidden_size": 64, "n_layer": 7, "n_head": 4, "vocab_size": 1531},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_deals_as_the_planner_does(family: str) -> None:
    spec = ModelSpec(type=family, config=FAMILIES[family])
    model = build_skeleton(build_config(spec, vocab_size=257))
    layout = describe(model)
    planned = shape_from_type(family, FAMILIES[family])
    found = planned_shape(model)
    assert found is not None
    assert [kind.linears for kind in found.kinds] == [kind.linears for kind in planned.kinds]
    assert (found.order, found.embedding_parameters) == (planned.order, planned.embedding_parameters)
    for num_stages in (2, 3, 7):
        sizes = tuple(map(len, split_model(model, layout, num_stages=num_stages).stages))
        assert sizes == partition_shape(planned, num_stages)


def test_a_config_that_nobody_knows_goes_by_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_skeleton(build_config(ModelSpec(type="llama", config=_SIZES), vocab_size=257))
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: None)
    assert planned_shape(model) is None
    block, head = sum(value.numel() for value in model.model.layers[0].parameters()), 1531 * 64
    before, costs, after = count_elements(model, describe(model), trace_forward(model, describe(model)))
    assert (before, costs, after) == (0, [block] * 7, head + 64)  # the table costs nothing, the final norm is there


class Uneven(nn.Module):
    """A layer before the blocks, a norm between them, a head after; the table is only looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 4)
        self.enter = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 10, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.head(third(self.norm(second(first(self.enter(self.table(ids)))))))  # type: ignore[no-any-return]


def test_parameters_count_where_they_are_used() -> None:
    model = Uneven()
    layout = describe(model)
    trace = trace_forward(model, layout)
    assert count_elements(model, layout, trace) == (16, [16, 16 + 4, 16], 40)
    assert partition_model(model, layout, trace, num_stages=2) == (2, 1)


def test_a_sequential_goes_by_parameters() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 40))
    split = split_model(model, describe(model), num_stages=2)
    assert split.stages == (("0", "1", "3"), ("4",))
    assert split.beside == {"2": 0}


class WithFloats(nn.Module):
    """Takes no token ids: images, features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 4), nn.Flatten())
        self.leave = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(inputs.flatten(1))))  # type: ignore[no-any-return]


def test_a_model_of_floats_is_asked_with_floats() -> None:
    split = split_model(WithFloats(), describe(WithFloats()), num_stages=2)
    assert split.stages == (("layers.0",), ("layers.2",))
    assert split.beside == {"layers.1": 0, "layers.3": 1}
    assert (split.home("enter.weight"), split.home("leave.weight")) == (0, 1)
