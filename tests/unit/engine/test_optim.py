"""Optimizers: groups, rates, and state made without a step."""

from __future__ import annotations

import pytest
import torch
from tiny import build_engine, train_steps
from torch import nn

from weft.core.run_spec import TrainSpec
from weft.engine.optim import Kind, OptimizerPolicy, build_optimizer, create_state, decay_groups, set_learning_rate

KINDS: tuple[Kind, ...] = ("adamw", "adam", "sgd", "adamw8bit")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 64), (8,), (4, 4))]


def trained(kind: Kind, steps: int, *, make_state_first: bool = False, skip: int | None = None) -> list[torch.Tensor]:
    given = parameters()
    optimizer = build_optimizer(given, OptimizerPolicy(kind=kind, learning_rate=1e-2))
    for step in range(steps):
        if make_state_first:
            create_state(optimizer, given)
        for index, parameter in enumerate(given):
            generator = torch.Generator().manual_seed(10 * step + index)
            if index != skip:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in given]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [None, 2])
def test_making_state_changes_nothing_about_training(kind: Kind, skip: int | None) -> None:
    """Also where one parameter never gets a gradient: the others' moments must not feel the state being made."""
    expected = trained(kind, 3, skip=skip)
    found = trained(kind, 3, skip=skip, make_state_first=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_state_afterwards_and_its_gradient_back(kind: Kind) -> None:
    given = parameters()
    given[0].grad = torch.ones_like(given[0])
    before = [parameter.detach().clone() for parameter in given]
    optimizer = build_optimizer(given, OptimizerPolicy(kind=kind, learning_rate=1e-2))
    create_state(optimizer, given)
    assert all(optimizer.state[parameter] for parameter in given)
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
    assert torch.equal(given[0].grad, torch.ones_like(given[0]))
    assert given[1].grad is None
    assert {float(group["lr"]) for group in optimizer.param_groups} == {1e-2}


def test_matrices_decay_and_vectors_do_not() -> None:
    given = parameters()
    groups = decay_groups(given, 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(2, 0.1), (1, 0.0)]
    assert len(decay_groups(given[1:2], 0.1)) == 1


def test_a_rate_kept_as_a_tensor_is_filled_in_place() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=torch.tensor(0.5))
    kept = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == 0.25


def test_the_policy_of_a_run() -> None:
    train = TrainSpec(
        optimizer="sgd", learning_rate=0.3, momentum=0.5, weight_decay=0.2, betas=(0.8, 0.9), epsilon=1e-6
    )
    policy = OptimizerPolicy.of(train)
    assert (policy.kind, policy.learning_rate, policy.momentum) == ("sgd", 0.3, 0.5)
    assert (policy.weight_decay, policy.betas, policy.epsilon) == (0.2, (0.8, 0.9), 1e-6)
    optimizer = build_optimizer(parameters(), policy)
    assert optimizer.defaults["momentum"] == 0.5


def test_saving_in_mid_run_does_not_move_the_curve() -> None:
    plain, looked_at = build_engine("llama"), build_engine("llama")
    looked_at.state()
    first = train_steps(looked_at, 2)
    looked_at.state()
    assert train_steps(plain, 4) == first + train_steps(looked_at, 2, first=2)
