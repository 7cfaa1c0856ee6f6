"""Tiny models with low-rank adapters, and engines over them."""

from __future__ import annotations

from typing import Any

import torch
from tiny import FAMILIES, train_steps

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.adapter.build import initial_weights, run_skeleton
from weft.models.build import build_config

CPU = torch.device("cpu")
ADAPTER: dict[str, Any] = {"kind": "lora", "rank": 4, "alpha": 8}


def adapted_run(family: str, adapter: dict[str, Any] | None = None) -> RunSpec:
    """A run of a tiny model with adapters."""
    model = FAMILIES[family].model_dump(exclude_none=True)
    return RunSpec.from_tables({"model": model, "adapter": {**ADAPTER, **(adapter or {})}, "train": {"seed": 0}})


def build_adapted(
    family: str,
    plan: dict[str, Any] | None = None,
    *,
    adapter: dict[str, Any] | None = None,
    learning_rate: float = 1e-2,
    device: torch.device = CPU,
    **options: Any,
) -> Engine:
    """An engine over the family's model with adapters, under a plan given as tables."""
    run = adapted_run(family, adapter)
    config = build_config(run.model, vocab_size=257)
    return Engine(
        run_skeleton(run, config),
        Plan.from_tables(plan or {}),
        optimizer=OptimizerPolicy(learning_rate=learning_rate),
        weights=initial_weights(run, config, device=CPU),
        device=device,
        **options,
    )


def adapted_curve(family: str, plan: dict[str, Any], steps: int, **options: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    with build_adapted(family, plan, **options) as engine:
        return train_steps(engine, steps)
