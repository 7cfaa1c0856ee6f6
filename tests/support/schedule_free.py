"""Schedule-free AdamW written out on full tensors: x is kept as the running average, and y is mixed from x and z."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny import global_batch

from weft.engine.optim.optimizers import OptimizerPolicy

FIRST, SECOND, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1
RATES = (1e-3, 2e-3, 3e-3, 3e-3, 3e-3)  # a warm-up, then constant
POLICY = OptimizerPolicy(kind="schedule_free", learning_rate=3e-3, betas=(FIRST, SECOND), weight_decay=DECAY)


def plain_curve(model: Any, rates: Sequence[float] = RATES) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The losses at y, the last x, and the loss at it on the next batch."""
    named = dict(model.named_parameters())
    z, x = ({name: value.detach().double().clone() for name, value in named.items()} for _ in range(2))
    square = {name: torch.zeros_like(value) for name, value in z.items()}
    losses, total, largest = [], 0.0, 0.0
    for step, rate in enumerate(rates):
        model.zero_grad()
        loss = mean_loss(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([value.grad.double().square().sum() for value in named.values()]).sum().sqrt()
        clip = min(1.0, 1.0 / (float(norm) + 1e-6))
        largest = max(largest, rate)
        total += largest**2
        share = largest**2 / total
        for name, y in named.items():
            gradient = y.grad.double() * clip
            square[name] = SECOND * square[name] + (1 - SECOND) * gradient**2
            direction = gradient / ((square[name] / (1 - SECOND ** (step + 1))).sqrt() + EPS)
            direction = direction + (DECAY if y.ndim >= 2 else 0.0) * y.detach().double()
            z[name] = z[name] - rate * direction
            x[name] = (1 - share) * x[name] + share * z[name]
            y.data.copy_((1 - FIRST) * z[name] + FIRST * x[name])
        losses.append(loss.item())
    for name, value in named.items():
        value.data.copy_(x[name])
    with torch.no_grad():
        return losses, x, float(mean_loss(model, len(rates)))


def mean_loss(model: Any, step: int) -> torch.Tensor:
    batch = global_batch(step)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
