"""Own parameter groups in a pipeline: every stage builds its optimizer of what it has, at the rates of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch
from torch.optim import SGD, Optimizer

from weft.core.errors import BadValueError

ONE = {"pipeline": {"microbatches": 4}}
TWO = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
LATE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}


def grouped(named_parameters: list[tuple[str, Any]]) -> Optimizer:
    tables = [parameter for name, parameter in named_parameters if "embed" in name]
    others = [parameter for name, parameter in named_parameters if "embed" not in name]
    return SGD([{"params": tables, "lr": 1.0}, {"params": others, "lr": 0.1}])


def without_empty_groups(named_parameters: list[tuple[str, Any]]) -> Optimizer:
    optimizer = grouped(named_parameters)
    return SGD([{"params": group["params"], "lr": group["lr"]} for group in optimizer.param_groups if group["params"]])


def trained(plan: dict[str, Any], steps: int, **options: Any) -> dict[str, torch.Tensor]:
    engine = build_engine("llama", plan, optimizer=grouped, clip_norm=0.0, **options)  # type: ignore[arg-type]
    for step in range(steps):
        engine.step(engine.share_of(global_batch(step)), learning_rate=0.5 / (step + 1))
    engine.drain()
    return {name: value.detach().clone() for name, value in engine.model.named_parameters()}


def on_ranks(rank: int, world: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with pytest.raises(BadValueError, match=r"learning rate 0.1 on some ranks and 1 on others"):
        build_engine("llama", TWO, optimizer=without_empty_groups)  # type: ignore[arg-type]
    # the first update of two buffers reads the first weights, as one step does; made later, at the second step's rate
    return trained(TWO, 2), trained(LATE, 1)


def test_stages_train_at_the_rates_of_one_process() -> None:
    right, first = trained(ONE, 2), trained(ONE, 1)
    for found, late in run_ranks(on_ranks, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-6)
        for name, value in late.items():
            torch.testing.assert_close(value, first[name], rtol=1e-5, atol=1e-6)
