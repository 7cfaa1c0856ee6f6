"""Parameter groups by pattern: decay and rate of each parameter, the same in a pipeline; Lion by its formula."""

from __future__ import annotations

import pytest
import torch
from tiny import build_engine, global_batch
from torch import nn

from weft.core.config import parse
from weft.core.errors import BadValueError, NotBuiltError, UnknownKeyError
from weft.core.parameter_groups import GroupSpec, decay_of, ratio_of, require_matches
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec, TrainSpec
from weft.engine.optim.group_rates import GroupRates
from weft.engine.optim.lion import Lion
from weft.engine.optim.optimizers import OptimizerPolicy, build_optimizer
from weft.plan.legality import broken_rules

GROUPS = (
    GroupSpec(pattern="embed*", learning_rate_ratio=2.0, weight_decay=0.0),
    GroupSpec(pattern="*.bias", learning_rate=1e-4, weight_decay=0.3),
)


def named() -> dict[str, nn.Parameter]:
    shapes = {"embed.weight": (4, 4), "block.weight": (4, 4), "block.bias": (4,), "norm.weight": (4,)}
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def test_decay_and_rate_of_each_parameter() -> None:
    decays = {name: decay_of(name, GROUPS, num_dims=value.ndim, weight_decay=0.1) for name, value in named().items()}
    assert decays == {"embed.weight": 0.0, "block.weight": 0.1, "block.bias": 0.3, "norm.weight": 0.0}
    ratios = {name: ratio_of(name, GROUPS, peak=1e-3) for name in named()}
    assert ratios == pytest.approx({"embed.weight": 2.0, "block.weight": 1.0, "block.bias": 0.1, "norm.weight": 1.0})


@pytest.mark.parametrize("held", [["embed.weight", "block.weight"], ["block.bias", "norm.weight"], ["block.bias"]])
def test_a_stage_with_any_parameters_has_the_runs_rates(held: list[str]) -> None:
    parameters = {name: value for name, value in named().items() if name in held}
    policy = OptimizerPolicy(learning_rate=1e-3, groups=GROUPS)
    names = {value: name for name, value in parameters.items()}
    optimizer = build_optimizer(list(parameters.values()), policy, names=names)
    rates = GroupRates(optimizer)
    assert rates.rate == pytest.approx(1e-3)
    rates.set(5e-4)
    assert rates.rate == pytest.approx(5e-4)
    found = {names[value]: float(group["lr"]) for group in optimizer.param_groups for value in group["params"]}
    assert found == pytest.approx({name: 5e-4 * ratio_of(name, GROUPS, peak=1e-3) for name in held})


def test_a_group_trains_with_its_own_rate() -> None:
    """A rate of zero keeps a parameter; the others move."""
    groups = (GroupSpec(pattern="*ln_*", learning_rate_ratio=0.0),)
    engine = build_engine("gpt2", optimizer=OptimizerPolicy(kind="lion", learning_rate=1e-2, groups=groups))
    before = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    engine.step(global_batch(0), learning_rate=1e-2)
    for name, value in engine.model.named_parameters():
        assert torch.equal(value, before[name]) == ("ln_" in name)


def test_keys_that_make_no_sense() -> None:
    tables = {"model": {"type": "llama"}, "train": {"groups": [{"pattern": "*", "rate": 1.0}]}}
    with pytest.raises(UnknownKeyError, match=r"unknown key .rate. in .*groups") as caught:
        parse(RunSpec, tables, source="run.toml")
    assert "learning_rate_ratio" in caught.value.hint
    with pytest.raises(BadValueError, match="one of learning_rate and learning_rate_ratio"):
        parse(TrainSpec, {"groups": [{"pattern": "*", "learning_rate": 1, "learning_rate_ratio": 1}]}, source="x")
    with pytest.raises(BadValueError, match=r"no parameter matches 'nothing\*'"):
        require_matches([GroupSpec(pattern="nothing*")], list(named()))


def test_lion_by_its_formula() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    optimizer = Lion([{"params": [weight], "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.99))
    expected, moment = weight.detach().double(), torch.zeros(4, dtype=torch.float64)
    for step in range(3):
        gradient = torch.tensor([1.0, -1.0, 0.5, -0.25]) * (-1) ** step * (step + 1)
        weight.grad = gradient.clone()
        optimizer.step()
        direction = (0.9 * moment + 0.1 * gradient.double()).sign()
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * direction
        moment = 0.99 * moment + 0.01 * gradient.double()
    assert torch.allclose(weight.detach().double(), expected, atol=1e-6)
    assert torch.allclose(optimizer.state[weight]["exp_avg"].double(), moment, atol=1e-7)


@pytest.mark.parametrize(
    "tables",
    [
        {"offload": {"optimizer": "cpu"}},
        {"precision": {"preset": "bf16", "optimizer_state": "bfloat16"}},
        {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}},
    ],
)
def test_what_lion_is_not_executed_with(tables: dict[str, dict[str, object]]) -> None:
    run = RunSpec.from_tables({"model": {"type": "llama"}, "train": {"optimizer": "lion"}})
    errors = [error for error in broken_rules(Plan.from_tables(tables), run) if isinstance(error, NotBuiltError)]
    assert any("train.optimizer = 'lion' is not executed with" in error.message for error in errors)
