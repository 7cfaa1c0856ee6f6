"""The average of the weights: its recurrence, its checkpoint, evaluation with it and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import build_engine, global_batch, train_steps

from weft.core.errors import BadValueError, NotBuiltError
from weft.core.optimizers import OptimizerKind
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.ownership import local
from weft.plan.legality import broken_rules

DECAY = 0.9


def policy(kind: OptimizerKind = "adamw") -> OptimizerPolicy:
    return OptimizerPolicy(kind=kind, learning_rate=1e-2, ema_decay=DECAY)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("plan", [{}, {"data_parallel": {"zero": 2}}])
def test_the_recurrence_from_the_initial_weights(kind: OptimizerKind, plan: dict[str, dict[str, int]]) -> None:
    engine = build_engine("gpt2", plan, optimizer=policy(kind))
    expected = {name: local(value.detach()).double() for name, value in engine.trained.items()}
    for step in range(3):
        train_steps(engine, 1, first=step)
        for name, value in engine.trained.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * local(value.detach()).double()
    for name, value in engine.trained.items():
        assert torch.allclose(local(engine.optimizer.state[value]["ema"]).double(), expected[name], atol=1e-6), name
    engine.close()


def test_an_evaluation_with_averages_changes_nothing() -> None:
    plain, other = (build_engine("gpt2", optimizer=policy()) for _ in range(2))
    train_steps(plain, 3)
    train_steps(other, 3)
    before = other.evaluate(global_batch(9)).loss
    with other.average_weights():
        averaged = other.evaluate(global_batch(9)).loss
    assert averaged != before
    assert other.evaluate(global_batch(9)).loss == before
    assert train_steps(plain, 2, first=3) == train_steps(other, 2, first=3)
    for (name, value), right in zip(plain.state().items(), other.state().values(), strict=True):
        assert torch.equal(local(value), local(right)), name


def test_a_checkpoint_continues_the_average(tmp_path: Path) -> None:
    straight, first, second = (build_engine("gpt2", optimizer=policy()) for _ in range(3))
    train_steps(straight, 4)
    train_steps(first, 2)
    first.save(tmp_path)
    assert second.load(tmp_path) == 2
    train_steps(second, 2, first=2)
    for (name, value), right in zip(straight.state().items(), second.state().values(), strict=True):
        assert torch.equal(value, right), name


def test_what_is_refused() -> None:
    with pytest.raises(BadValueError, match=r"needs train\.ema_decay"):
        RunSpec.from_tables({"model": {"type": "llama"}, "evaluation": {"weights": "ema"}})
    run = RunSpec.from_tables({"model": {"type": "llama"}, "train": {"ema_decay": DECAY}})
    errors = list(broken_rules(Plan.from_tables({"offload": {"optimizer": "cpu"}}), run))
    assert [error.message for error in errors if isinstance(error, NotBuiltError)] == [
        "train.ema_decay is not executed with offload.optimizer"
    ]
