"""The learning rate as a pure function of the step: warm-up, then cosine, linear or constant.

With w warm-up steps of n and final ratio f: rate(s) = peak * s/w up to s = w, then peak * (f + (1 - f) * shape(x)),
x = (s - w) / (n - w) from 0 to 1. Steps count from 1.
"""

from __future__ import annotations

import math

from weft.core.run_spec import TrainSpec


def learning_rate_at(train: TrainSpec, step: int) -> float:
    """The learning rate of step `step`; the first step is 1."""
    warmup = min(train.warmup_steps, train.steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    if train.schedule == "constant":
        return train.learning_rate
    progress = min(1.0, (step - warmup) / max(1, train.steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    final = train.final_learning_rate_ratio
    return train.learning_rate * (final + (1 - final) * shape)
