"""What the planner is asked: a model shape, a cluster, a workload and a precision. Frozen values, nothing computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.core.cluster import Cluster
from weft.core.model_shape import AttentionShape, ModelShape
from weft.core.precision import PrecisionPolicy

OptimizerKind = Literal["adamw", "adam", "sgd", "adamw8bit"]
OptimizerKernel = Literal["auto", "fused", "foreach"]
# sdpa: torch's kernels where they compute the family's attention, else written out, as training does; eager: always
# written out; fused: a kernel for every variant (soft caps, sinks, ALiBi), which other trainers have
AttentionKind = Literal["sdpa", "eager", "fused"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BLOCK = 256  # numbers that share one float32 scale in an 8-bit moment


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step's work, whatever the layout."""

    global_batch: int  # sequences
    sequence_length: int
    optimizer: OptimizerKind = "adamw"
    optimizer_kernel: OptimizerKernel = "auto"
    momentum: float = 0.9
    attention: AttentionKind = "sdpa"

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the planner."""

    shape: ModelShape
    cluster: Cluster
    workload: Workload
    precision: PrecisionPolicy
    memory_share: float = 0.97  # of the device that a plan may fill: the rest covers what no formula sees
    tp_may_leave_node: bool = False  # only where a person asks for it by name

    @property
    def is_cpu(self) -> bool:
        return self.cluster.device.is_cpu

    def writes_scores(self, attention: AttentionShape) -> bool:
        """Whether attention probabilities go through memory. GPUs have no fused kernel for grouped float32 queries."""
        kind, policy = self.workload.attention, self.precision
        is_grouped = attention.num_kv_heads < attention.num_heads
        without_kernel = policy.activations == "float32" and is_grouped and not self.is_cpu
        return kind == "eager" or (kind == "sdpa" and (attention.materialises_scores or without_kernel))

    @property
    def budget_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_share


@dataclass(frozen=True, kw_only=True)
class ByteSizes:
    """Bytes of one number of each kind, as the precision policy has it."""

    compute: int  # weights as they are gathered and multiplied
    master: int  # weights at rest
    gradient: int  # gradients as the optimizer sees them
    communication: int  # gradients on the wire
    activation: int
    optimizer: float  # all optimizer states of one parameter
    update: int  # temporaries of the update, a parameter
    is_mixed: bool


def byte_sizes(request: Request) -> ByteSizes:
    """The sizes of a request."""
    policy = request.precision
    of = DTYPE_BYTES
    return ByteSizes(
        compute=of[policy.weights],
        master=of[policy.master_weights],
        gradient=of[policy.gradients],
        communication=of[policy.communication],
        activation=of[policy.activations],
        optimizer=optimizer_bytes(request.workload, state_bytes=of[policy.optimizer_state]),
        update=update_bytes(
            request.workload, state_bytes=of[policy.optimizer_state], master_bytes=of[policy.master_weights]
        ),
        is_mixed=policy.is_mixed,
    )


def optimizer_bytes(workload: Workload, *, state_bytes: int) -> float:
    """State bytes a parameter: two moments, two quantised moments with their scales, one momentum, or nothing."""
    match workload.optimizer:
        case "adamw8bit":
            return 2 * (1 + 4 / QUANTISED_BLOCK)
        case "sgd":
            return float(state_bytes) if workload.momentum > 0 else 0.0
        case _:
            return 2.0 * state_bytes


def update_bytes(workload: Workload, *, state_bytes: int, master_bytes: int) -> int:
    """Temporaries of an update, a parameter: `foreach` makes one list of tensors at a time, others none to speak of.

    adamw: the roots of the second moments; adam: those, after gradients with their decay; sgd: gradients with decay.
    """
    if workload.optimizer_kernel != "foreach" or workload.optimizer == "adamw8bit":
        return 0
    return {"adamw": state_bytes, "adam": max(state_bytes, master_bytes), "sgd": master_bytes}[workload.optimizer]
