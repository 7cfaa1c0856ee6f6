"""One set of learning rates for sync, async and geo: what an update from one share of a step's samples counts for.

Sync's update is made of the mean over P shares. One share's mean has P times the variance; its expectation is the same.

    async   a push is divided by P times its samples: P pushes make a step, and sync's sums of squares where noise
            dominates. Adam does not see a gradient's size: its rate is divided by the root of P
    geo     differences are averaged; a worker's sums of squares, all of its own, are P times sync's, so an accumulator
            begins P times as high and rates are multiplied by the root of P. SGD's average is right as it is
"""

from __future__ import annotations

from weft.core.table_spec import RowOptimizer


def push_rate(optimizer: RowOptimizer, *, shares: int) -> float:
    """Of async: the factor of the learning rate of a push, beside its smaller gradient."""
    return shares**-0.5 if optimizer.kind == "adam" else 1.0


def local_optimizer(optimizer: RowOptimizer, *, shares: int) -> RowOptimizer:
    """Of geo, where differences are averaged: the optimizer of a worker's own rows."""
    if optimizer.kind == "sgd":
        return optimizer
    root = shares**0.5
    return optimizer.model_copy(
        update={
            "learning_rate": optimizer.learning_rate * root,
            "initial_accumulator": optimizer.initial_accumulator * shares,
            "beta": optimizer.beta * root,  # stands beside the root of ftrl's sum of squares
        }
    )
