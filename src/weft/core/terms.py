"""Names of the quantities that are predicted, dry-run and measured, so that the three can be compared row by row.

Memory terms are disjoint: their sum is the peak. A term is a plain string, so records stay JSON.
"""

from __future__ import annotations

from enum import StrEnum


class MemoryTerm(StrEnum):
    """Terms of a rank's memory."""

    WEIGHTS = "weights"  # the rank's local shard of the parameters, in the master dtype if there is one
    GRADIENTS = "gradients"  # the reduced gradients that the optimizer reads
    OPTIMIZER_STATE = "optimizer_state"  # with error feedback also the errors of gradients
    GATHERED = "gathered_weights"  # weights in the compute dtype: gathered units, or casts that the backward needs
    COMM_BUFFERS = "communication_buffers"  # inputs and outputs of collectives in flight, receive buffers
    WEIGHT_VERSIONS = "weight_versions"  # older weights that an asynchronous pipeline still needs
    ACTIVATIONS = "activations"  # tensors saved for the backward, recomputed ones included
    LOGITS = "logits_and_loss"
    TEMPORARIES = "temporaries"  # inputs and outputs of operators at the peak, kernel workspaces
    BUFFERS = "buffers"  # non-parameter tensors of the model
    FRAMEWORK = "framework"  # outside the tensor allocator: device context, communicators, fragmentation
    OTHER = "other"  # measured bytes of no other term


class TimeTerm(StrEnum):
    """Terms of a step's seconds."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    FORWARD_BACKWARD = "forward_backward"  # the sum of the two, as in the planner
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"


class StepTerm(StrEnum):
    """The planner's terms of a step: the first seven are forward and backward, exposed communication included."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    FLOAT8_CASTS = "float8_casts"  # amax, casts and transposes around float8 matmuls
    RECOMPUTE = "recompute"
    LOSS = "logits_and_loss"
    TEACHER = "teacher"  # of a distillation: its forward and the divergence
    LAUNCH = "kernel_launch"  # launch latency of small kernels
    TP_COMM = "tensor_communication"
    CP_COMM = "context_communication"
    EP_COMM = "expert_communication"
    DP_COMM = "data_communication"  # not overlapped with compute
    PP_COMM = "pipeline_communication"
    OFFLOAD_COPIES = "offload_copies"  # of weights and activations from and to the host, not overlapped with compute
    BUBBLE = "pipeline_bubble"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"  # the update of offloaded states
