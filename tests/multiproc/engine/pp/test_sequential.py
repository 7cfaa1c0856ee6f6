"""An nn.Sequential with an objective of its own, cut into stages, trains as one process does.

It has no config, no tokens and no names: floats of one width go in, each child is called with one tensor, widths
change from layer to layer, and what is reshaped between them has a shape that only the stage before knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gloo_ranks import run_ranks
from tolerances import SAME_STEP_REL
from torch import Tensor, nn

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.objective import Batch
from weft.engine.pp.runtime import PipelineRuntime

ROWS, CUTS, STEPS = 16, 4, 3
Arrays = dict[str, npt.NDArray[np.float32]]


class Squares:
    """The sum of squared errors; every row counts one."""

    def weight(self, batch: Batch) -> Tensor:
        return torch.tensor(float(len(batch["inputs"])))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["inputs"]) - batch["targets"]).square().sum()


def build_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 48), nn.ReLU(), nn.LayerNorm(48),
        nn.Linear(48, 32), nn.ReLU(), nn.LayerNorm(32),
        nn.Unflatten(1, (8, 4)), nn.Linear(4, 6), nn.ReLU(), nn.Flatten(),
        nn.Linear(48, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 3),
    )  # fmt: skip


class Wrapped(nn.Module):
    """The same inside a module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


def global_batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, 12, generator=generator)
    return {"inputs": inputs, "targets": inputs[:, :3].sin() + inputs[:, 3:6]}


# "0" is not named here: a layer with weights before the first block, and "13" one after the last
BY_NAME = ("2", "3", "5", "7", "10", "11")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({"schedule": "1f1b"}, {}),
    "zbv": ({"schedule": "zbv", "virtual_stages": 2}, {}),
    "1f1b, by hand": ({"schedule": "1f1b", "blocks": [2, 6]}, {}),
    "zbv, by hand": ({"schedule": "zbv", "virtual_stages": 2, "blocks": [1, 4, 1, 2]}, {}),
    "1f1b, named": ({"schedule": "1f1b"}, {"blocks": BY_NAME}),
    "zbv, named": ({"schedule": "zbv", "virtual_stages": 2}, {"blocks": BY_NAME}),
}


def trained(
    rank: int, world: int, cases: list[str], is_wrapped: bool = False
) -> dict[str, tuple[Arrays, Arrays, list[float], list[int]]]:
    """First gradients, last weights, losses, and how many blocks each stage has."""
    found = {}
    for case in cases:
        pipeline, options = CASES[case] if world > 1 else ({}, {})
        tables = {"mesh": {"pp": world}, "pipeline": {"microbatches": CUTS, **pipeline}}
        model = Wrapped() if is_wrapped else build_model()
        engine = Engine(model, Plan.from_tables(tables), objective=Squares(), **options)
        gradients: Arrays = {}

        def keep(named: dict[str, Tensor], into: Arrays = gradients) -> None:
            for name, value in named.items():
                into.setdefault(name, value.numpy().copy())

        engine.on_gradients = keep
        losses = [engine.step(global_batch(step), learning_rate=1e-2).loss for step in range(STEPS)]
        losses.append(engine.evaluate(global_batch(99)).loss)
        weights = {name: value.detach().numpy().copy() for name, value in engine.model.named_parameters()}
        pipeline = PipelineRuntime.of(engine)
        stages = pipeline.schedule_runner.stages.split.stages if pipeline is not None else ()
        found[case] = gradients, weights, losses, list(map(len, stages))
    return found


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["alone", "in a module"])
def test_a_sequential_trains_as_one_process_does(is_wrapped: bool) -> None:
    cases = ["1f1b", "zbv"] if is_wrapped else list(CASES)
    (alone,) = run_ranks(trained, 1, ["1f1b"], is_wrapped)
    gradients, weights, losses, _ = alone["1f1b"]
    by_rank = run_ranks(trained, 2, cases, is_wrapped, timeout_s=120)
    for case in cases:
        parts = [of_rank[case] for of_rank in by_rank]
        assert all(part[2] == pytest.approx(losses, rel=SAME_STEP_REL) for part in parts), case
        for index, expected in ((0, gradients), (1, weights)):
            found = {name: value for part in parts for name, value in part[index].items()}
            assert sorted(name for part in parts for name in part[index]) == sorted(expected), case
            for name, value in expected.items():
                np.testing.assert_allclose(
                    found[name], value, rtol=SAME_STEP_REL, atol=SAME_STEP_REL * abs(value).max(), err_msg=case
                )
        by_hand = CASES[case][0].get("blocks")
        assert by_hand is None or parts[0][3] == by_hand
