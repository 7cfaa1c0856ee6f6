"""Learning rates of parameter groups, and what an optimizer of the user's own is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import build_engine, global_batch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from weft.engine.optim.group_rates import GroupRates, at_rate, current_rates


def optimizer_of(*rates: float | torch.Tensor) -> Optimizer:
    return AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates])


@pytest.mark.parametrize(
    ("given", "asked", "expected"),
    [
        ((0.01, 0.0001), 0.005, (0.005, 0.00005)),
        ((0.0001, 0.01), 0.0002, (0.0002, 0.02)),
        ((0.0, 0.1, 0.2), 0.3, (0.0, 0.3, 0.6)),
        ((0.0, 0.0), 0.3, (0.3, 0.3)),
        ((0.01, 0.0001), 0.0, (0.0, 0.0)),
    ],
)
def test_a_rate_scales_groups(given: tuple[float, ...], asked: float, expected: tuple[float, ...]) -> None:
    optimizer = optimizer_of(*given)
    rates = GroupRates(optimizer)
    for _ in range(2):  # ratios are those of the start, also after a rate of zero
        rates.set(0.0)
        rates.set(asked)
        assert current_rates(optimizer) == pytest.approx(expected)
        assert rates.rate == pytest.approx(asked)


def test_a_group_that_is_added_later_has_the_ratio_it_came_with() -> None:
    optimizer = optimizer_of(0.1)
    rates = GroupRates(optimizer)
    rates.set(0.05)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.2})
    rates.set(0.5)
    assert current_rates(optimizer) == pytest.approx([0.5, 1.0])


def test_a_rate_kept_as_a_tensor_is_filled_in_place() -> None:
    optimizer = optimizer_of(torch.tensor(0.5), torch.tensor(0.25))
    kept = optimizer.param_groups[1]["lr"]
    GroupRates(optimizer).set(0.1)
    assert optimizer.param_groups[1]["lr"] is kept
    assert float(kept) == pytest.approx(0.05)


def test_one_update_at_the_rates_of_another_step() -> None:
    optimizer = optimizer_of(0.1, 0.2)
    with at_rate(optimizer, [1.0, 3.0]):
        assert current_rates(optimizer) == [1.0, 3.0]
    assert current_rates(optimizer) == [0.1, 0.2]


def test_a_step_scales_the_groups_of_an_own_optimizer() -> None:
    def grouped(named_parameters: list[tuple[str, nn.Parameter]]) -> Optimizer:
        norms = [parameter for name, parameter in named_parameters if "norm" in name]
        others = [parameter for name, parameter in named_parameters if "norm" not in name]
        return SGD([{"params": others, "lr": 0.01}, {"params": norms, "lr": 0.0001}])

    engine = build_engine("llama", optimizer=grouped)  # type: ignore[arg-type]
    before = {name: value.detach().clone() for name, value in engine.trained.items()}
    shown: dict[str, Any] = {}
    engine.on_gradients = lambda gradients: shown.update({name: one.clone() for name, one in gradients.items()})
    record = engine.step(global_batch(0), learning_rate=0.005)
    assert record.learning_rate == pytest.approx(0.005)
    assert current_rates(engine.optimizer) == pytest.approx([0.005, 0.00005])
    factor = min(1.0, 1.0 / record.grad_norm)
    for name, value in engine.trained.items():
        rate = 0.00005 if "norm" in name else 0.005
        torch.testing.assert_close(value.detach(), before[name] - rate * factor * shown[name], rtol=1e-5, atol=1e-8)


def test_names_lie_beside_the_parameters_of_a_group() -> None:
    """A function that passes the groups on, or reads their tensors, need not know of names."""
    seen: list[Any] = []

    def passed_on(groups: list[dict[str, Any]]) -> Optimizer:
        seen.extend(groups)
        assert all(parameter.ndim in (1, 2) for parameter in groups[0]["params"])
        return AdamW(groups, lr=0.1)

    engine = build_engine("llama", optimizer=passed_on)  # type: ignore[arg-type]
    assert seen[0]["param_names"] == list(engine.trained)
    assert engine.optimizer.param_groups[0]["param_names"] == list(engine.trained)
    assert isinstance(build_engine("llama", optimizer=AdamW).optimizer, AdamW)  # type: ignore[arg-type]
