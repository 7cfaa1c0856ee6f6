"""A token whose experts are nearly tied may move an evaluation; one whose experts are not may not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from weft.verify.near_ties import (
    FACTOR,
    SHARES,
    Perturbation,
    evaluation_swing,
    perturbed,
    runs_that_choose_otherwise,
)
from weft.verify.run_trace import RunTrace
from weft.verify.tolerances import NOISE_SHARE


def loss_of_the_chosen_expert(weights: Mapping[str, Tensor]) -> float:
    return (3.0, 4.0)[int(weights["gate"].argmax())]


@pytest.mark.parametrize(("gap", "swing"), [(1e-9, FACTOR), (1e-5, FACTOR), (0.1, 0.0)])
def test_only_a_near_tie_swings(gap: float, swing: float) -> None:
    initial = {"gate": torch.tensor([0.5, 0.4], dtype=torch.float64)}
    weights = {"gate": torch.tensor([0.5, 0.5 - gap], dtype=torch.float64)}
    assert evaluation_swing(loss_of_the_chosen_expert, weights, initial) == swing


def test_a_smooth_evaluation_moves_by_a_share_of_the_update() -> None:
    initial, weights = {"w": torch.zeros(64).double()}, {"w": torch.ones(64).double()}
    swing = evaluation_swing(lambda given: float(given["w"].sum()), weights, initial)
    assert 0 < swing <= FACTOR * NOISE_SHARE * 64


def test_what_did_not_train_does_not_move() -> None:
    weights = {"gate": torch.tensor([0.5, 0.5 - 1e-12], dtype=torch.float64)}
    assert evaluation_swing(loss_of_the_chosen_expert, weights, weights) == 0


def test_an_element_that_did_not_train_does_not_move() -> None:
    """Routers that start at zero: experts that no token has chosen have equal scores, and stay so in correct runs."""
    initial, weights = {"gate": torch.zeros(4).double()}, {"gate": torch.tensor([0.1, 0.0, -0.2, 0.0]).double()}
    moved = perturbed(weights, initial, Perturbation(0))["gate"]
    assert ((moved != weights["gate"]) == torch.tensor([True, False, True, False])).all()
    assert (moved - weights["gate"]).norm() == pytest.approx(NOISE_SHARE * weights["gate"].norm())


def test_runs_that_choose_otherwise_begin_with_the_nearest_tie() -> None:
    def run(perturbation: Perturbation) -> RunTrace:
        """Draw 5 crosses its tie in step 2, draw 1 another one by 4 times the movement in step 1, others none."""
        crossed = {5: (2, SHARES[0]), 1: (1, SHARES[1])}.get(perturbation.draw)
        step = crossed[0] if crossed and perturbation.share >= crossed[1] else 0
        return RunTrace(choices=[{"experts": torch.tensor([[int(step == each)]])} for each in (1, 2)])

    truth = RunTrace(choices=[{"experts": torch.tensor([[0]])}] * 2)
    assert [step for _, step in runs_that_choose_otherwise(truth, run)] == [2, 1]
