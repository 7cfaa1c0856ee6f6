"""A token whose experts are nearly tied may move an evaluation; one whose experts are not may not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from weft.verify.near_ties import FACTOR, evaluation_swing
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
