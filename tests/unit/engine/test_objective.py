"""Objectives: a user's own with fractional weights, and the one division that training and evaluation share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CPU, global_batch
from tolerances import SAME_STEP_REL
from torch import nn

from weft.core.plan import Plan
from weft.engine.dp.threads import DataParallelSlownessWarning, Threaded, require_gpus
from weft.engine.engine import Engine
from weft.engine.objective import Batch, CausalLanguageModel, TokenClassifier, objective_for, token_loss_sum
from weft.engine.optim.optimizers import OptimizerPolicy


class Weighted:
    """A regression whose samples carry fractional weights."""

    def weight(self, batch: Batch) -> torch.Tensor:
        return batch["w"].sum()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch["x"]).squeeze(-1).square() * batch["w"]).sum()


def batch(scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 4, generator=generator), "w": torch.rand(8, generator=generator) * scale}


def engine(**tables: Any) -> Engine:
    torch.manual_seed(0)
    policy = OptimizerPolicy(kind="sgd", learning_rate=0.1, weight_decay=0.0, momentum=0.0)
    plan = Plan.from_tables(tables)
    return Engine(nn.Linear(4, 1), plan, objective=Weighted(), optimizer=policy, device=CPU, clip_norm=0.0)


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_float_weights_divide_once_in_training_and_evaluation(scale: float, microbatches: int) -> None:
    """With weights that sum below one, too: the divisor is their sum, never one."""
    given = batch(scale)
    trained = engine(pipeline={"microbatches": microbatches})
    expected = (Weighted().loss_sum(trained.model, given) / given["w"].sum()).item()
    assert trained.evaluate(given).loss == pytest.approx(expected, rel=SAME_STEP_REL)
    assert trained.evaluate([given, given]).loss == pytest.approx(expected, rel=SAME_STEP_REL)
    record = trained.step(given)
    assert record.loss == pytest.approx(expected, rel=SAME_STEP_REL)
    other = engine()
    other.step(batch(1.0))
    torch.testing.assert_close(trained.model.weight, other.model.weight)  # a common factor of all weights cancels


def test_an_evaluation_without_weight_is_zero() -> None:
    assert engine().evaluate(batch(0.0)).loss == 0.0
    assert engine().evaluate([]).tokens == 0


def test_labels_that_do_not_count() -> None:
    given = global_batch(0, rows=4)
    assert CausalLanguageModel().weight(given) == (given["labels"] != -100).sum()
    logits = torch.zeros(2, 3, 5, dtype=torch.bfloat16)
    labels = torch.tensor([[1, -100, 2], [-100, -100, 0]])
    loss = token_loss_sum(logits, labels)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(3 * torch.tensor(5.0).log().item())


def test_the_objective_fits_the_model() -> None:
    assert isinstance(objective_for(nn.Linear(2, 2)), TokenClassifier)
    bad = Engine(nn.Embedding(256, 4), Plan(), objective=CausalLanguageModel(), device=CPU)
    with pytest.raises(TypeError):
        bad.step(global_batch(0))


class Nothing(nn.Module):
    def forward(self, ids: torch.Tensor) -> Any:
        class Output:
            logits = None

        return Output()


def test_a_model_without_logits_is_named() -> None:
    with pytest.raises(TypeError, match="no logits tensor"):
        TokenClassifier().loss_sum(Nothing(), global_batch(0))


def test_dataparallel_warns_and_asks_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.core.errors import DeviceError, NotBuiltError
    from weft.core.precision import policy_of

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="this machine has none") as caught:
        require_gpus(policy_of("fp32"))
    assert "--nproc" in caught.value.hint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpus(policy_of("fp32"))
    with pytest.raises(NotBuiltError, match="fp32 only"):
        require_gpus(policy_of("bf16"))
    monkeypatch.undo()
    with pytest.warns(DataParallelSlownessWarning, match="DDP"):
        wrapped = Threaded(nn.Linear(2, 2))
    assert isinstance(wrapped.module, nn.DataParallel)


def test_a_subclass_need_not_call_the_constructor() -> None:
    class Own(CausalLanguageModel):
        def __init__(self) -> None:
            self.factor = 2.0

    assert Own().token_loss is None
    assert Own().model_loss is None
