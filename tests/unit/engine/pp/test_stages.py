"""Stages of a plain model in one process, one after the other: the numbers of the whole, or one sentence why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.core.errors import PipelineError
from weft.engine.pp.stages import StageCall, StageDone, Stages, drop_other_stages
from weft.models.layout import describe
from weft.models.pp.split import split_model

WIDTH, CPU = 8, torch.device("cpu")


class Block(nn.Module):
    def __init__(self, memory: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.memory = memory

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Plain(nn.Module):
    """Its norm lies between two blocks, its unused block nowhere."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        memory: dict[str, Tensor] = {}
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(kind(memory) for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor) -> Any:
        hidden = self.table(ids)
        for index, block in enumerate(self.blocks[:4]):
            hidden = block(hidden)
            if index == 1:
                hidden = self.norm(hidden)
        return self.head(hidden)


def run_stages(model: nn.Module, ids: Tensor, num_stages: int) -> tuple[Tensor, set[str]]:
    """Logits, and the names that all stages have together; no name is on two of them."""
    split, hidden, names = split_model(model, describe(model), num_stages=num_stages), None, list[str]()
    for stage in range(num_stages):
        own = copy.deepcopy(model)
        drop_other_stages(own, describe(own), split, (stage,), dtype=torch.float32, device=CPU)
        names += [name for name, _ in own.named_parameters()]
        stages = Stages(own, split, (stage,))
        with stages.forward_of(stage, hidden):
            try:
                hidden = StageCall(own, stages, stage)(ids)
            except StageDone as done:
                hidden = done.hidden
    assert hidden is not None
    assert len(names) == len(set(names))
    return hidden, set(names)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_are_the_whole(num_stages: int) -> None:
    torch.manual_seed(0)
    model, ids = Plain(Block), torch.arange(12).view(2, 6)
    logits, names = run_stages(model, ids, num_stages)
    assert torch.equal(logits, model(ids))
    assert names == {name for name, _ in model.named_parameters()}


class Remembers(Block):
    """The first block leaves a value where later ones look for it: no probe sees that."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.memory:
            self.memory["first"] = hidden
        return super().forward(hidden) + self.memory["first"]


class Missing(Remembers):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.inner.weight[0, 0] == 0:  # the first block's mark
            self.memory["first"] = hidden
        return Block.forward(self, hidden) + self.memory["first"]


def test_a_value_that_only_an_earlier_stage_has() -> None:
    model = Plain(Missing)
    nn.init.zeros_(model.blocks[0].inner.weight)
    with pytest.raises(PipelineError, match=r"stage 1 of Plain does not run \(KeyError: 'first'\)") as refusal:
        run_stages(model, torch.zeros((1, 4), dtype=torch.int64), 2)
    assert refusal.value.hint == "use mesh.pp = 1"


class FromTable(Plain):
    """The last block reads a table's value off the model, not out of its arguments."""

    def forward(self, ids: Tensor) -> Any:
        self.blocks[3].memory["first"] = self.table(ids)
        return super().forward(ids)


def test_nan_that_a_stage_makes_itself() -> None:
    model = FromTable(Remembers)
    with pytest.raises(PipelineError, match="stage 1 of FromTable turns finite hidden states into NaN"):
        run_stages(model, torch.zeros((1, 4), dtype=torch.int64), 2)


def test_nan_that_was_received_is_not_the_pipelines() -> None:
    model = Plain(Block)
    nn.init.constant_(model.table.weight, float("nan"))
    logits, _ = run_stages(model, torch.zeros((1, 4), dtype=torch.int64), 2)
    assert logits.isnan().all()


class Pair(nn.Module):
    """Hands two tensors on, as nn.Sequential lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> tuple[Tensor, Tensor]:
        hidden = given[0] if isinstance(given, tuple) else given
        return self.inner(hidden), hidden


def test_blocks_that_hand_each_other_two_tensors_are_refused() -> None:
    with pytest.raises(PipelineError, match="blocks of Sequential pass each other more than one tensor"):
        run_stages(nn.Sequential(Pair(), Pair()), torch.zeros(2, WIDTH), 2)


def test_a_sequential_reshapes_between_its_blocks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 24), nn.ReLU(), nn.Unflatten(1, (4, 6)), nn.Linear(6, 3), nn.Flatten(), nn.Linear(12, 2)
    )
    inputs = torch.randn(3, WIDTH)
    logits, names = run_stages(model, inputs, 3)
    assert torch.equal(logits, model(inputs))
    assert names == {name for name, _ in model.named_parameters()}
