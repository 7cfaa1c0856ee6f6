"""Optimizers: groups, rates, and state made without a step."""

from __future__ import annotations

import pytest
import torch
from new_storages import NewStorages
from tiny import build_engine, train_steps
from torch import nn

from weft.core.errors import BadValueError, NotBuiltError
from weft.core.run_spec import TrainSpec
from weft.engine.optim.optimizers import (
    Kernel,
    Kind,
    OptimizerPolicy,
    build_optimizer,
    create_state,
    decay_groups,
)

KINDS: tuple[Kind, ...] = ("adamw", "adam", "sgd", "adamw8bit")
SHARDED = {"data_parallel": {"zero": 3}}
KERNELS: tuple[Kernel, ...] = ("auto", "fused", "foreach")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 64), (8,), (4, 4))]


def trained(
    kind: Kind, steps: int, *, kernel: Kernel = "auto", make_state_first: bool = False, skip: int | None = None
) -> list[torch.Tensor]:
    given = parameters()
    optimizer = build_optimizer(given, OptimizerPolicy(kind=kind, learning_rate=1e-2, kernel=kernel))
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


def test_the_policy_of_a_run() -> None:
    train = TrainSpec(
        optimizer="sgd",
        optimizer_kernel="foreach",
        learning_rate=0.3,
        momentum=0.5,
        weight_decay=0.2,
        betas=(0.8, 0.9),
        epsilon=1e-6,
    )
    policy = OptimizerPolicy.of(train)
    assert (policy.kind, policy.learning_rate, policy.momentum) == ("sgd", 0.3, 0.5)
    assert (policy.weight_decay, policy.betas, policy.epsilon, policy.kernel) == (0.2, (0.8, 0.9), 1e-6, "foreach")
    optimizer = build_optimizer(parameters(), policy)
    assert optimizer.defaults["momentum"] == 0.5


def test_saving_in_mid_run_does_not_move_the_curve() -> None:
    plain, looked_at = build_engine("llama"), build_engine("llama")
    looked_at.state()
    first = train_steps(looked_at, 2)
    looked_at.state()
    assert train_steps(plain, 4) == first + train_steps(looked_at, 2, first=2)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_train_alike(kind: Kind, kernel: Kernel) -> None:
    for found, expected in zip(trained(kind, 3, kernel=kernel), trained(kind, 3), strict=True):
        torch.testing.assert_close(found, expected)  # float32's own tolerance: the order of operations differs
    for made, plain in zip(
        trained(kind, 3, kernel=kernel, make_state_first=True), trained(kind, 3, kernel=kernel), strict=True
    ):
        assert torch.equal(made, plain)


@pytest.mark.parametrize(
    ("kind", "kernel", "matrix_lists"),
    [
        ("adamw", "auto", 0),
        ("adamw", "fused", 0),
        ("adamw", "foreach", 1),  # the roots of the second moments
        ("adam", "foreach", 1),  # first the gradients with their decay; they are gone when the roots come
        ("sgd", "foreach", 1),
        ("sgd", "fused", 0),
    ],
)
def test_what_an_update_takes_besides(kind: Kind, kernel: Kernel, matrix_lists: int) -> None:
    """plan.request.update_bytes is this, counted on torch itself."""
    given = parameters()
    optimizer = build_optimizer(given, OptimizerPolicy(kind=kind, kernel=kernel))
    create_state(optimizer, given)
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    states = [value for state in optimizer.state.values() for value in state.values()]
    with NewStorages(known=[*given, *(parameter.grad for parameter in given), *states]) as new:
        optimizer.step()
    matrices = [parameter for parameter in given if parameter.ndim >= 2]
    expected = sum(parameter.nbytes for parameter in matrices) * matrix_lists
    assert expected <= new.peak_bytes <= expected + 16 * len(given)  # scalars


def test_sgd_on_auto_takes_one_parameter_at_a_time() -> None:
    """On every device: torch's own choice is another on a GPU, where a dry run could not see it."""
    assert build_optimizer(parameters(), OptimizerPolicy(kind="sgd")).defaults["foreach"] is False
    assert build_optimizer(parameters(), OptimizerPolicy(kind="adamw")).defaults["fused"] is True


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_8_bit_has_no_choice_of_kernel(kernel: Kernel) -> None:
    with pytest.raises(BadValueError, match="adamw8bit has a single kernel"):
        build_optimizer(parameters(), OptimizerPolicy(kind="adamw8bit", kernel=kernel))


def test_fused_sgd_of_sharded_parameters_is_refused_before_training() -> None:
    policy = OptimizerPolicy(kind="sgd", kernel="fused")
    with pytest.raises(NotBuiltError, match="no fused sgd for sharded") as caught:
        build_engine("llama", SHARDED, optimizer=policy)
    assert "foreach" in caught.value.hint


@pytest.mark.parametrize("kind", KINDS[:3])
def test_foreach_trains_sharded_parameters(kind: Kind) -> None:
    rate = 1e-2 if kind == "sgd" else 1e-3
    policies = [OptimizerPolicy(kind=kind, learning_rate=rate, kernel=kernel) for kernel in ("auto", "foreach")]
    found = [train_steps(build_engine("llama", SHARDED, optimizer=policy), 3) for policy in policies]
    for auto, foreach in zip(*found, strict=True):
        assert auto == pytest.approx(foreach, rel=1e-5)
