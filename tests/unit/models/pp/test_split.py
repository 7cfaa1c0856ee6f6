"""Where models are cut: families with their ends in odd places, by hand, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core.errors import PipelineError
from weft.models.layout import describe
from weft.models.pp.split import PipelineSplit, split_model

WIDTH = 8


def split(model: nn.Module, num_stages: int = 2, **options: Any) -> PipelineSplit:
    return split_model(model, describe(model), num_stages=num_stages, **options)


# OPT defines its final norm before its blocks; GPT-2 has two tables; Bloom normalises its table's rows
BEFORE = {
    "llama": {"model.embed_tokens.weight"},
    "qwen3-tied": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "opt": {"model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"},
    "bloom": {
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings_layernorm.weight",
        "transformer.word_embeddings_layernorm.bias",
    },
}


@pytest.mark.parametrize("case", sorted(BEFORE))
@pytest.mark.parametrize("kind", ["tiny_skeleton", "tiny_model"])
def test_the_forward_says_what_comes_first(case: str, kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)(case)
    found = split(model)
    assert (found.before, found.between, found.idle) == (BEFORE[case], {}, ())
    assert found.blocks == describe(model).blocks
    assert [len(stage) for stage in found.stages] == [1, 1]


def test_bloom_takes_hidden_states_out_of_a_tuple(tiny_skeleton: Callable[[str], Any]) -> None:
    assert (split(tiny_skeleton("bloom")).num_outputs, split(tiny_skeleton("llama")).num_outputs) == (1, 0)


def test_a_model_is_left_as_it_was(tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("gpt2").train()
    modules, random = _insides(model), torch.get_rng_state()
    split(model)
    assert _insides(model) == modules
    assert torch.equal(torch.get_rng_state(), random)


def _insides(model: nn.Module) -> dict[str, Any]:
    """Identities: equal modules are not the same."""
    return {
        name: [(key, id(value)) for table in (vars(module), module._modules) for key, value in table.items()]
        for name, module in model.named_modules()
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, extra: Tensor | None = None) -> Tensor:
        return hidden + self.inner(hidden) + (0 if extra is None else extra)


class Plain(nn.Module):
    """Four blocks between a table and a head; subclasses run them otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.through(self.table(ids)))

    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_blocks_by_hand() -> None:
    found = split(Plain(), sizes=[3, 1])
    assert found.stages == (("blocks.0", "blocks.1", "blocks.2"), ("blocks.3",))
    assert (found.home("table.weight"), found.home("head.weight")) == (0, 1)


@pytest.mark.parametrize("sizes", [[4], [2, 3], [4, 0]])
def test_blocks_by_hand_that_do_not_add_up(sizes: list[int]) -> None:
    with pytest.raises(PipelineError, match="does not partition 4 blocks into 2 stages"):
        split(Plain(), sizes=sizes)


def test_too_few_blocks() -> None:
    with pytest.raises(PipelineError, match="Plain has 4 blocks, too few for 5 pipeline stages"):
        split(Plain(), num_stages=5)


class NormBetween(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        return last(third(self.norm(second(first(hidden)))))


def test_what_is_used_between_blocks_is_on_the_stage_of_the_block_before() -> None:
    names = {"norm.weight", "norm.bias"}
    assert split(NormBetween()).between == dict.fromkeys(names, 0)
    assert split(NormBetween(), num_stages=4).between == dict.fromkeys(names, 1)


class Reordered(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[1](self.blocks[3](hidden)))


def test_order_is_that_of_the_forward_and_idle_blocks_are_told() -> None:
    found = split(Reordered(), sizes=[2, 1])
    assert (found.stages, found.idle) == ((("blocks.3", "blocks.1"), ("blocks.0",)), ("blocks.2",))


class Pairs(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden, _ = block(hidden)
        return hidden


def test_values_beside_hidden_states_that_nobody_uses() -> None:
    assert split(Pairs()).num_outputs == 2


class PairsPassedOn(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        extra = None
        for block in self.blocks:
            hidden, extra = block(hidden, extra)
        return hidden


class FromTheTable(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        extra = hidden * 2
        for block in self.blocks:
            hidden = block(hidden, extra=extra)
        return hidden


class Skip(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        kept = first(hidden)
        return last(third(second(kept)) + kept)


class SkipToTheEnd(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        return super().through(hidden) + hidden


class SkipToTheHead(SkipToTheEnd):
    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Twice(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        return super().through(super().through(hidden))


class TableAsHead(Plain):
    def forward(self, ids: Tensor) -> Any:
        return self.through(self.table(ids)) @ self.table.weight.T


class NormEverywhere(Plain):
    def through(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self.norm(block(hidden))
        return hidden


class TwoInputs(Plain):
    def forward(self, ids: Tensor, image: Tensor) -> Any:
        return super().forward(ids) + image


REFUSED = {
    PairsPassedOn: "its block blocks.2 also takes extra, which stages do not send each other",
    FromTheTable: "its block blocks.2 also takes extra, which stages do not send each other",
    Skip: "its hidden states for blocks.3 use more than the previous block's output",
    SkipToTheEnd: "after its blocks it uses more than the last block's output",
    SkipToTheHead: "after its blocks it uses more than the last block's output",
    Twice: "it runs blocks.0 more than once",
    TableAsHead: "it uses table.weight on several stages",
    NormEverywhere: "it uses norm.weight on several stages",
    TwoInputs: "its forward does not run on 4 token ids only",
}


@pytest.mark.parametrize("kind", sorted(REFUSED, key=str))
def test_what_a_pipeline_cannot_carry_is_refused(kind: type[Plain]) -> None:
    with pytest.raises(PipelineError) as refusal:
        split(kind(), sizes=[2, 2])
    assert f"{kind.__name__} cannot be split into pipeline stages: {REFUSED[kind]}" in str(refusal.value)
    assert "mesh.pp = 1" in refusal.value.hint


def test_a_skip_inside_one_stage_is_no_matter() -> None:
    assert split(Skip(), sizes=[3, 1]).num_stages == 2


@pytest.mark.parametrize("key", ["layerdrop", "num_kv_shared_layers"])
def test_what_only_the_config_tells(key: str, tiny_skeleton: Callable[[str], Any]) -> None:
    model = tiny_skeleton("opt")
    setattr(model.config, key, 1)
    with pytest.raises(PipelineError, match=rf"cannot be split into pipeline stages: it.* \(model.config.{key}\)"):
        split(model)
