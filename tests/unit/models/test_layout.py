"""The blocks finder: Hugging Face families, plain modules, ties; what is a block and what is only part of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES
from torch import nn
from transformers import CONFIG_MAPPING

from weft.core.errors import NoBlocksError
from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import ROOT, ModelLayout, describe, find_blocks, find_ties, require_blocks

_OLD = {"hidden_size": 32, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FOUND: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
        [f"model.layers.{index}" for index in range(3)],
    ),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, ["transformer.h.0", "transformer.h.1"]),
    "mixtral": (dict(FAMILIES["mixtral"].config), ["model.layers.0", "model.layers.1"]),
    "opt": (
        {**_OLD, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        ["model.decoder.layers.0", "model.decoder.layers.1"],
    ),
    "bloom": ({**_OLD, "n_layer": 2, "n_head": 4}, ["transformer.h.0", "transformer.h.1"]),
    "gpt_neox": (
        {**_OLD, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        ["gpt_neox.layers.0", "gpt_neox.layers.1"],
    ),
    "gpt_neox_japanese": ({**_OLD, "num_hidden_layers": 1, "num_attention_heads": 4}, ["gpt_neox_japanese.layers.0"]),
    "mamba": ({**_OLD, "num_hidden_layers": 2, "state_size": 4}, ["backbone.layers.0", "backbone.layers.1"]),
}


def skeleton(model_type: str, config: dict[str, Any]) -> nn.Module:
    return build_skeleton(build_config(ModelSpec(type=model_type, config=config), vocab_size=90))


@pytest.mark.parametrize("model_type", sorted(FOUND))
def test_blocks_of_hugging_face_families(model_type: str) -> None:
    config, expected = FOUND[model_type]
    layout = describe(skeleton(model_type, config))
    assert list(layout.blocks) == expected
    assert set(layout.unit_of.values()) == {*expected, ROOT}  # experts, norms and heads are in a block or in the root
    assert layout.units == (*expected, ROOT)


def test_a_one_layer_model_has_one_block() -> None:
    model = skeleton("llama", {**FAMILIES["llama"].config, "num_hidden_layers": 1})
    assert find_blocks(model) == ["model.layers.0"]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(sum(expert(x) for expert in self.experts))  # type: ignore[arg-type]


class Tower(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = blocks
        self.head = nn.Linear(8, 16, bias=False)


def test_lists_of_a_plain_module_are_its_blocks_and_experts_inside_are_not() -> None:
    assert find_blocks(Tower(nn.ModuleList(Block() for _ in range(2)))) == ["blocks.0", "blocks.1"]
    assert find_blocks(Tower(nn.Sequential(Block(), nn.ReLU(), Block()))) == ["blocks.0", "blocks.2"]
    assert find_blocks(nn.Sequential(nn.Embedding(16, 8), Block(), nn.ReLU())) == ["0", "1"]


def test_a_list_of_lists_is_opened_since_a_list_has_no_forward_to_gather_for() -> None:
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))
    assert find_blocks(Tower(pairs)) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]
    named = nn.ModuleList(nn.ModuleDict({"attention": nn.Linear(8, 8), "mlp": Block()}) for _ in range(2))
    found = ["blocks.0.attention", "blocks.0.mlp", "blocks.1.attention", "blocks.1.mlp"]
    assert find_blocks(Tower(named)) == found


def test_a_sequential_with_one_module_and_a_bare_module_have_no_blocks() -> None:
    assert find_blocks(Tower(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))) == []
    layout = describe(nn.Linear(4, 4))
    with pytest.raises(NoBlocksError, match="no repeated blocks"):
        require_blocks(layout)
    assert layout.unit_of == {"weight": ROOT, "bias": ROOT}


def test_a_weight_shared_by_two_blocks_takes_both_to_the_root() -> None:
    model = Tower(nn.ModuleList(Block() for _ in range(4)))
    model.blocks[2].mlp[0].weight = model.blocks[0].mlp[0].weight  # type: ignore[index]
    model.blocks[3].mlp[2].weight = model.head.weight = nn.Parameter(torch.zeros(8, 8))  # type: ignore[index]
    layout = describe(model)
    assert layout.blocks == ("blocks.1",)
    assert layout.ties == {"blocks.2.mlp.0.weight": "blocks.0.mlp.0.weight", "head.weight": "blocks.3.mlp.2.weight"}
    assert {unit for name, unit in layout.unit_of.items() if not name.startswith("blocks.1.")} == {ROOT}
    assert len(layout.notes) == 3
    assert all("gathered with the root" in note for note in layout.notes)


def test_a_tie_inside_one_block_keeps_the_block() -> None:
    model = Tower(nn.ModuleList(Block() for _ in range(2)))
    model.blocks[1].mlp[2].weight = model.blocks[1].mlp[0].weight  # type: ignore[index]
    layout = describe(model)
    assert layout.blocks == ("blocks.0", "blocks.1")
    assert layout.notes == ()


def test_tied_embeddings_have_one_name() -> None:
    model = skeleton("qwen3", {**FAMILIES["qwen3-tied"].config})
    assert find_ties(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in describe(model).unit_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["blocks"], ("blocks.0", "blocks.2")),  # a member without parameters is no unit
        (["blocks.2", "head"], ("blocks.2", "head")),
        (["blocks.0", "blocks"], ("blocks.0", "blocks.2")),
        ([], ()),
    ],
)
def test_blocks_named_by_hand(given: list[str], expected: tuple[str, ...]) -> None:
    layout = describe(Tower(nn.Sequential(Block(), nn.ReLU(), Block())), blocks=given)
    assert layout.blocks == expected


def test_wrong_names_are_refused() -> None:
    model = Tower(nn.Sequential(Block(), Block()))
    with pytest.raises(NoBlocksError, match="no module 'layers'"):
        describe(model, blocks=["layers"])
    with pytest.raises(NoBlocksError, match=r"'blocks\.0\.mlp\.0' lies inside 'blocks\.0'"):
        describe(model, blocks=["blocks.0.mlp", "blocks.0"])


def test_every_parameter_has_one_unit() -> None:
    for model_type, (config, _) in FOUND.items():
        model = skeleton(model_type, config)
        layout: ModelLayout = describe(model)
        assert list(layout.unit_of) == [name for name, _ in model.named_parameters()], model_type
        for name, unit in layout.unit_of.items():
            assert unit == ROOT or name.startswith(f"{unit}.")
    assert set(FOUND) <= set(CONFIG_MAPPING)
