"""Engines of tiny families on a GPU, and their losses. For tests/gpu only."""

from __future__ import annotations

from typing import Any

import torch
from tiny import FAMILIES, global_batch

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

CUDA = torch.device("cuda", 0)


def engine_on(device: torch.device, family: str, plan: dict[str, Any], *, kind: str = "adamw") -> Engine:
    """Weights are always drawn on the CPU here, so that both devices start alike."""
    config = build_config(FAMILIES[family], vocab_size=257)
    skeleton = build_skeleton(config)
    return Engine(
        build_skeleton(config),
        Plan.from_tables(plan),
        optimizer=OptimizerPolicy(kind=kind, learning_rate=3e-4),  # type: ignore[arg-type]
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=torch.device("cpu")),
        device=device,
    )


def losses(engine: Engine, steps: int = 10) -> list[float]:
    return [engine.step(global_batch(step)).loss for step in range(steps)]


def worst(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
