"""The engine on one process against a plain PyTorch loop written out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch, train_steps
from tolerances import SAME_STEP_REL
from torch import nn

from weft.checkpoint import CheckpointStore
from weft.core.errors import (
    BadValueError,
    BatchError,
    CheckpointError,
    DeviceError,
    MeshError,
    NoBlocksError,
    NotBuiltError,
)
from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy


def plain_loop(engine: Engine, steps: int, *, clip: float) -> list[tuple[float, float]]:
    """Reference: mean token loss, clip_grad_norm_, torch's AdamW, on a copy of the engine's initial weights."""
    model = engine.model
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=3e-4, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    found = []
    for step in range(steps):
        batch = global_batch(step)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_steps_equal_a_plain_loop(clip: float) -> None:
    expected = plain_loop(build_engine("llama"), 4, clip=clip)
    found = train_steps(build_engine("llama", {"pipeline": {"microbatches": 4}}, clip_norm=clip), 4)
    for (loss, norm), (other_loss, other_norm) in zip(expected, found, strict=True):
        assert other_loss == pytest.approx(loss, rel=SAME_STEP_REL)
        assert other_norm == pytest.approx(norm, rel=SAME_STEP_REL)


def test_evaluation_is_the_mean_over_all_tokens_and_changes_nothing() -> None:
    engine = build_engine("gpt2")
    batches = [global_batch(step, rows=rows) for step, rows in ((0, 4), (1, 8))]
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    record = engine.evaluate(batches)
    engine.model.eval()
    sums = [0.0, 0.0]
    with torch.no_grad():
        for batch in batches:
            logits = engine.model(input_ids=batch["input_ids"]).logits
            sums[0] += F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
            sums[1] += (batch["labels"] != -100).sum().item()
    assert record.loss == pytest.approx(sums[0] / sums[1], rel=SAME_STEP_REL)
    assert record.tokens == sums[1]
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    assert engine.evaluate(batches).loss == record.loss  # dropout is off
    engine.model.train()


def test_a_batch_without_labels_changes_no_weight_by_gradient() -> None:
    engine = build_engine("llama", optimizer=OptimizerPolicy(kind="sgd", weight_decay=0.0))
    batch = global_batch(0)
    batch["labels"][:] = -100
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    record = engine.step(batch)
    assert (record.loss, record.grad_norm, record.tokens) == (0.0, 0.0, 0)
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())


def test_frozen_parameters_stay_and_are_saved() -> None:
    engine = build_engine("llama", frozen=["model.embed_tokens.*", "*.layers.0.*"])
    frozen = {name: p.clone() for name, p in engine.model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 10
    others = {name: p.clone() for name, p in engine.model.named_parameters() if p.requires_grad}
    train_steps(engine, 2)
    now = dict(engine.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in frozen.items())
    assert not any(torch.equal(value, now[name]) for name, value in others.items())
    assert all(f"model.{name}" in engine.state() for name in frozen)
    with pytest.raises(BadValueError, match="nothing_here"):
        build_engine("llama", frozen=["nothing_here*"])


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "adamw8bit"])
def test_every_optimizer_learns(kind: str) -> None:
    rate = 0.05 if kind == "sgd" else 3e-3
    engine = build_engine("llama", optimizer=OptimizerPolicy(kind=kind, learning_rate=rate))  # type: ignore[arg-type]
    batch = global_batch(0)
    losses = [engine.step(batch).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2


class Mlp(nn.Module):
    """A plain module: no Hugging Face, no list called layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.body:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("zero", [0, 3])
def test_any_module_trains_under_any_stage(zero: int) -> None:
    torch.manual_seed(0)
    engine = Engine(
        Mlp(), Plan.from_tables({"data_parallel": {"zero": zero}}), optimizer=OptimizerPolicy(learning_rate=1e-2)
    )
    assert engine.layout.blocks == ("body.0", "body.1", "body.2")
    batch = global_batch(0)
    losses = [engine.step(batch).loss for _ in range(10)]
    assert losses[-1] < losses[0] - 0.3


def test_errors_are_sentences() -> None:
    with pytest.raises(NoBlocksError, match="no repeated blocks"):
        Engine(nn.Linear(4, 4), Plan.from_tables({"data_parallel": {"zero": 3}}))
    with pytest.raises(MeshError, match="2 ranks"):
        Engine(Mlp(), Plan.from_tables({"mesh": {"dp_shard": 2}}))
    with pytest.raises(NotBuiltError):
        Engine(Mlp(), Plan.from_tables({"mesh": {"tp": 2}, "compile": {"enabled": True}}))
    engine = build_engine("llama", {"pipeline": {"microbatches": 17}})
    with pytest.raises(BatchError, match="17 micro-batches"):
        engine.step(global_batch(0))
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this machine has none"):
            Engine(Mlp(), Plan.from_tables({"data_parallel": {"strategy": "dataparallel"}}))


def test_a_user_supplied_optimizer_is_used() -> None:
    engine = Engine(Mlp(), Plan(), optimizer=lambda groups: torch.optim.RMSprop(groups, lr=1e-3))
    assert isinstance(engine.optimizer, torch.optim.RMSprop)
    losses = [engine.step(global_batch(0)).loss for _ in range(5)]
    assert losses[-1] < losses[0]


def test_learning_rate_given_to_a_step_is_the_one_used() -> None:
    engine = build_engine("llama")
    assert engine.step(global_batch(0), learning_rate=1e-5).learning_rate == 1e-5


@pytest.mark.parametrize(
    "meta", [{}, {"engine": []}, {"engine": {}}, {"engine": {"steps_done": "x", "loss_scale": {}}}]
)
def test_a_checkpoint_that_does_not_say_where_training_stood_is_refused(
    meta: dict[str, object], tmp_path: Path
) -> None:
    engine = build_engine("llama")
    store = CheckpointStore(tmp_path)
    store.save(engine.state(), meta, step=1, asynchronous=False)
    with pytest.raises(CheckpointError, match="lacks the state of training"):
        engine.load(tmp_path)
