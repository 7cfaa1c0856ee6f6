"""The learning rate as a pure function of the step: warm-up, then the schedule. Steps count from 1.

With w warm-up steps of n and final ratio f: rate(s) = peak * s/w up to s = w, then

    cosine, linear   peak * (f + (1 - f) * shape(x)), x = (s - w) / (n - w) from 0 to 1
    wsd              peak up to step b = max(w, n - round(decay_share * n)), then the line of linear with b for w
    inverse_sqrt     peak * sqrt(max(w, 1) / s)
    constant         peak
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
    if train.schedule == "inverse_sqrt":
        return train.learning_rate * math.sqrt(max(warmup, 1) / step)
    begin = warmup
    if train.schedule == "wsd":
        begin = max(warmup, train.steps - round(train.decay_share * train.steps))
    if step <= begin or begin == train.steps:
        return train.learning_rate
    progress = min(1.0, (step - begin) / (train.steps - begin))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1.0 - progress
    final = train.final_learning_rate_ratio
    return train.learning_rate * (final + (1 - final) * shape)


def groups_in_words(train: TrainSpec) -> dict[str, tuple[float, str]]:
    """The peak rate and the decay of every parameter group, by pattern; those of all other parameters last."""
    found = {}
    for group in train.groups:
        decay = f"{train.weight_decay:g} on matrices" if group.weight_decay is None else f"{group.weight_decay:g}"
        found[group.pattern] = (train.learning_rate * group.ratio(train.learning_rate), decay)
    rest = "all others" if found else "all"
    return {**found, rest: (train.learning_rate, f"{train.weight_decay:g} on matrices, 0 on vectors (norms, biases)")}
