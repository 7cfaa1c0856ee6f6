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
    GATHERED = "gathered_weights"  # weights in the compute dtype: gathered units, or casts that the backward needs
    COMM_BUFFERS = "communication_buffers"  # inputs and outputs of collectives in flight, receive buffers
    WEIGHT_VERSIONS = "weight_versions"  # older weights that an asynchronous pipeline still needs
    ACTIVATIONS = "activations"  # what autograd keeps for the backward, recomputed parts included
    LOGITS = "logits_and_loss"
    TEMPORARIES = "temporaries"  # operators' own inputs and outputs at the peak, kernel workspaces
    BUFFERS = "buffers"  # non-parameter tensors of the model
    FRAMEWORK = "framework"  # outside the tensor allocator: device context, communicators, fragmentation
    OTHER = "other"  # measured bytes that no other term claims


class TimeTerm(StrEnum):
    """Where a step's seconds go."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward_backward"  # the two together, as the planner has them
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"


class StepTerm(StrEnum):
    """How the planner cuts a step: the first seven are forward and backward, exposed communication included."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    FLOAT8_CASTS = "float8_casts"  # largest magnitudes, casts and new layouts around products in float8
    RECOMPUTE = "recompute"
    LOSS = "logits_and_loss"
    LAUNCH = "kernel_launch"  # what small kernels wait for
    TP_COMM = "tensor_communication"
    CP_COMM = "context_communication"
    EP_COMM = "expert_communication"
    DP_COMM = "data_communication"  # only what compute could not hide
    PP_COMM = "pipeline_communication"
    BUBBLE = "pipeline_bubble"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
