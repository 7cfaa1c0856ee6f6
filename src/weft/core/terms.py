"""The names of the quantities that are predicted, dry-run and measured, so that the three line up row by row.

Memory terms are disjoint: their sum is the peak. A term is a plain string, so records stay JSON.
"""

from __future__ import annotations

from enum import StrEnum


class MemoryTerm(StrEnum):
    """Where a rank's bytes go."""

    WEIGHTS = "weights"  # the rank's own shard of the parameters, in the master dtype where there is one
    GRADIENTS = "gradients"  # the reduced gradients, as the optimizer sees them
    OPTIMIZER_STATE = "optimizer_state"
    BUFFERS = "buffers"  # non-parameter tensors of the model
    OTHER = "other"  # activations, gathered parameters, temporaries, the framework: what is left of the peak


class TimeTerm(StrEnum):
    """Where a step's seconds go."""

    DATA = "data"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
