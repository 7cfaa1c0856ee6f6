"""One set of learning rates for sync, async and geo: the weight of an update from one share of a step.

The sync update uses the mean over P shares. The mean of one share has the same expectation and P times the variance.

    async   a push is divided by P times its samples: P pushes are one step, with the sums of squares of sync where
            noise dominates. Adam ignores the size of a gradient: its rate is divided by the root of P
    geo     deltas are averaged; the sums of squares of one worker are P times those of sync, so an accumulator starts
            P times as high and rates are multiplied by the root of P. The average of SGD needs no change
"""

from __future__ import annotations

from weft.core.table_spec import RowOptimizer


def push_rate(optimizer: RowOptimizer, *, shares: int) -> float:
    """async: the factor of the learning rate of a push."""
    return shares**-0.5 if optimizer.kind == "adam" else 1.0


def local_optimizer(optimizer: RowOptimizer, *, shares: int) -> RowOptimizer:
    """geo with averaged deltas: the optimizer of the local rows of a worker."""
    if optimizer.kind == "sgd":
        return optimizer
    root = shares**0.5
    return optimizer.model_copy(
        update={
            "learning_rate": optimizer.learning_rate * root,
            "initial_accumulator": optimizer.initial_accumulator * shares,
            "beta": optimizer.beta * root,  # added to the root of ftrl's sum of squares
        }
    )
