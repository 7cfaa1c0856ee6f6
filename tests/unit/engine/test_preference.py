"""Direct preference optimisation: its loss and gradients are the formula's, written out a second time over one row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import build_engine

import weft
from weft.core.errors import BatchError, NotBuiltError
from weft.core.objective_spec import ObjectiveSpec
from weft.core.plan import Plan
from weft.engine.objective import Batch, CausalLanguageModel
from weft.engine.preference import REFERENCE, DirectPreference, objective_of
from weft.engine.reference import row_log_probs

PAIRS, LENGTH = 4, 12
FORMULA_ABS = 1e-6  # float32 forwards of the same model
SPECS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "smoothed": {"label_smoothing": 0.2, "beta": 0.5},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "without reference": {"reference": "none", "beta": 0.05},
    "sigmoid per token": {"per_token": True, "beta": 2.0},
}


def pairs(step: int = 0, *, filler: bool = False) -> dict[str, torch.Tensor]:
    """Pairs of uneven answers; the last one only fills the batch if asked."""
    tokens = torch.randint(0, 256, (2 * PAIRS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for row in range(2 * PAIRS):
        labels[row, : 2 + row % 5] = -100
    if filler:
        labels[-2:] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def spec(**keys: Any) -> ObjectiveSpec:
    return ObjectiveSpec(kind="dpo", **keys)


def written_out(model: Any, batch: dict[str, torch.Tensor], given: ObjectiveSpec) -> torch.Tensor:
    """The mean over pairs that count, one row and one token at a time."""
    losses = []
    for pair in range(PAIRS):
        sums, counts = [], []
        for row in (2 * pair, 2 * pair + 1):
            ids, labels = batch["input_ids"][row], batch["labels"][row]
            probabilities = model(input_ids=ids[None], use_cache=False).logits[0].double().softmax(-1)
            at = [place for place in range(LENGTH) if labels[place] != -100]
            sums.append(sum(torch.log(probabilities[place, labels[place]]) for place in at))
            counts.append(len(at))
        if 0 in counts:
            continue
        if given.has_reference:
            sums = [value - batch[REFERENCE][2 * pair + side] for side, value in enumerate(sums)]
        if given.is_per_token:
            sums = [value / count for value, count in zip(sums, counts, strict=True)]
        margin = sums[0] - sums[1]
        if given.loss == "ipo":
            losses.append((margin - 1 / (2 * given.beta)) ** 2)
        else:
            right, swapped = 1 / (1 + torch.exp(-given.beta * margin)), 1 / (1 + torch.exp(given.beta * margin))
            share = given.label_smoothing
            losses.append(-(1 - share) * torch.log(right) - share * torch.log(swapped))
    return sum(losses) / len(losses)  # type: ignore[return-value]


@pytest.mark.parametrize("filler", [False, True], ids=["all", "filler"])
@pytest.mark.parametrize("name", SPECS)
def test_loss_and_gradients_are_those_of_the_formula(name: str, filler: bool) -> None:
    given = spec(**SPECS[name])
    batch = pairs(filler=filler)
    reference = torch.linspace(-70, -50, 2 * PAIRS, dtype=torch.float64)
    batch = {**batch, REFERENCE: reference} if given.has_reference else batch
    plan = {"pipeline": {"microbatches": 2}}
    engine = build_engine("qwen3-tied", plan, objective=DirectPreference(given), clip_norm=0.0)
    plain = build_engine("qwen3-tied", {}).model
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda values: found.update({key: value.clone() for key, value in values.items()})
    record = engine.step(batch)
    loss = written_out(plain, batch, given)
    loss.backward()  # type: ignore[no-untyped-call]
    assert record.loss == pytest.approx(loss.item(), abs=FORMULA_ABS, rel=FORMULA_ABS)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad, atol=FORMULA_ABS, rtol=1e-4)
    assert record.tokens == int((batch["labels"] != -100).sum())


def test_the_first_step_has_no_margin_and_later_ones_do() -> None:
    engine = build_engine("qwen3-tied", objective=DirectPreference(spec()))
    batch = pairs()
    batch[REFERENCE] = row_log_probs(engine, batch)
    records = [engine.step(batch, learning_rate=1e-2) for _ in range(3)]
    assert records[0].loss == pytest.approx(math.log(2), abs=1e-6)
    assert records[0].figures is not None
    assert records[2].figures is not None
    assert records[0].figures["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    last = records[2].figures
    assert last["reward_margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"], abs=1e-6)
    assert last["reward_margin"] > 0.1
    assert last["reward_accuracy"] == 1.0


def test_an_evaluation_is_not_counted_in_the_figures_of_a_step() -> None:
    engine, batch = build_engine("qwen3-tied", objective=DirectPreference(spec(reference="none"))), pairs()
    other = build_engine("qwen3-tied", objective=DirectPreference(spec(reference="none")))
    other.evaluate(batch)
    assert engine.step(batch).figures == other.step(batch).figures


def test_rows_that_are_no_pairs_and_a_missing_reference_are_named() -> None:
    engine = build_engine("qwen3-tied", objective=DirectPreference(spec()))
    with pytest.raises(BatchError, match="needs 'reference_log_probs' in the batch"):
        engine.step(pairs())
    odd = {key: value[:3] for key, value in pairs().items()}
    with pytest.raises(BatchError, match="3 rows are no pairs"):
        engine.step(odd)


def test_an_engine_refuses_pairs_where_they_are_not_built() -> None:
    with pytest.raises(NotBuiltError, match="does not train pairs with context parallelism"):
        DirectPreference(spec()).bind(torch.nn.Linear(1, 1), Plan.from_tables({"mesh": {"cp": 2}}), None)


def test_an_objective_of_ones_own_reports_figures() -> None:
    class Counted(CausalLanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.figures = weft.StepFigures("rows")

        def loss_sum(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            self.figures.add([torch.tensor(float(len(batch["labels"])))])
            return super().loss_sum(model, batch)

    batch = pairs()
    record = build_engine("qwen3-tied", {"pipeline": {"microbatches": 2}}, objective=Counted()).step(batch)
    assert record.figures == {"rows": 2 * PAIRS / record.tokens}


def test_orpo_is_its_formula() -> None:
    beta = 0.4
    objective = objective_of(ObjectiveSpec(kind="orpo", beta=beta))
    engine = build_engine("qwen3-tied", {"pipeline": {"microbatches": 2}}, objective=objective, clip_norm=0.0)
    plain = build_engine("qwen3-tied", {}).model
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda values: found.update({key: value.clone() for key, value in values.items()})
    batch = pairs(filler=True)
    record = engine.step(batch)
    losses = []
    for pair in range(PAIRS - 1):
        means = []
        for row in (2 * pair, 2 * pair + 1):
            logits = plain(input_ids=batch["input_ids"][row][None], use_cache=False).logits[0].double()
            at = batch["labels"][row] != -100
            means.append(logits.log_softmax(-1)[at].gather(-1, batch["labels"][row][at, None]).mean())
        odds = [mean.exp() / (1 - mean.exp()) for mean in means]
        losses.append(-means[0] - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert record.loss == pytest.approx(loss.item(), rel=FORMULA_ABS)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[key], parameter.grad, atol=FORMULA_ABS, rtol=1e-4)
