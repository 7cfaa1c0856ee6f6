"""The teacher of a distillation in the cost model: a whole model on every rank, in the compute dtype, forward alone.

weights        all its parameters, never sharded
logits         its own beside the student's, and the terms of the divergence, in float32 (engine/distillation.py)
time           one forward of its eager blocks per micro-batch; passes of the divergence over the logits
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.plan.columns import Floats
from weft.plan.time.compute import block_seconds
from weft.plan.view import View, view_at

# The divergence of one logit in float32: the log-probabilities of both, exp, difference, product; beside the logits.
DIVERGENCE_BYTES = 20
# Reads and writes of it, forward and backward: casts, divisions, softmaxes, the sum and its gradient.
DIVERGENCE_MOVED = 128


def teacher_bytes(view: View) -> float:
    """Weights of the teacher on every rank."""
    teacher = view.request.workload.teacher
    return float(teacher.num_parameters * view.sizes.compute) if teacher is not None else 0.0


def loss_bytes(view: View, next_token: float) -> float:
    """Bytes per logit at the loss; `next_token` is that of the loss of the next token alone."""
    if view.request.workload.teacher is None:
        return next_token
    return max(next_token, DIVERGENCE_BYTES + 2 * view.sizes.activation)


def teacher_seconds(view: View) -> Floats:
    """Seconds per step of the teacher's forwards and of the divergence."""
    request, columns = view.request, view.columns
    teacher, device = request.workload.teacher, request.cluster.device
    nothing = np.zeros(len(columns))
    if teacher is None:
        return nothing
    eager = replace(
        columns, compiled=nothing.astype(int), float8=nothing.astype(int), float8_linears=nothing.astype(int)
    )
    alone = replace(request, shape=teacher, workload=replace(request.workload, teacher=None))
    busy = block_seconds(view_at(alone, eager, view.rows, place=0))
    moved = DIVERGENCE_MOVED * view.tokens * request.shape.vocab_size
    divergence = moved / (device.memory_bytes_per_s * device.memory_share)
    return np.asarray(columns.microbatches * (busy.forward + busy.launch / 3 + divergence), dtype=np.float64)
