"""Input of the planner: a model shape, a cluster, a workload and a precision, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.core.cluster import Cluster
from weft.core.model_shape import AttentionShape, ModelShape
from weft.core.muon import Precision
from weft.core.optimizers import OPTIMIZERS, OptimizerKind
from weft.core.precision import PrecisionPolicy
from weft.core.wire_bytes import CODED, number_bytes, scale_bytes

OptimizerKernel = Literal["auto", "fused", "foreach"]
# sdpa: torch's kernels if they support the family's attention, else materialised scores, as in training; eager: always
# materialised; fused: a kernel for every variant (soft caps, sinks, ALiBi), as other trainers have
AttentionKind = Literal["sdpa", "eager", "fused"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BLOCK = 256  # elements per float32 scale in an 8-bit moment


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a step, independent of the layout."""

    global_batch: int  # sequences
    sequence_length: int
    optimizer: OptimizerKind = "adamw"
    optimizer_kernel: OptimizerKernel = "auto"
    momentum: float = 0.9
    attention: AttentionKind = "sdpa"
    muon_precision: Precision = "auto"
    has_average: bool = False  # of the weights, in float32

    teacher: ModelShape | None = None  # of a distillation: whole on every rank
    # mean length of the document that a token is in, where documents of a row do not attend to each other
    document_length: float | None = None
    rows_per_sample: int = 1  # 2: pairs, which are not divided over ranks or micro-batches

    @property
    def samples(self) -> int:
        return self.global_batch // self.rows_per_sample

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def attended_length(self) -> float:
        """The mean length of what a token is in: its document, or the row."""
        return min(self.document_length or self.sequence_length, self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to the planner."""

    shape: ModelShape
    cluster: Cluster
    workload: Workload
    precision: PrecisionPolicy
    memory_share: float = 0.97  # of device memory that a plan may use; the rest is a margin for prediction errors
    host_share: float = 0.9  # of host memory that offload may pin; the rest is for the system and the processes
    tp_may_leave_node: bool = False  # only for plans that the user gives

    @property
    def is_cpu(self) -> bool:
        return self.cluster.device.is_cpu

    def writes_scores(self, attention: AttentionShape) -> bool:
        """Whether attention materialises its scores. GPUs have no fused kernel for grouped float32 queries."""
        kind, policy = self.workload.attention, self.precision
        is_grouped = attention.num_kv_heads < attention.num_heads
        without_kernel = policy.activations == "float32" and is_grouped and not self.is_cpu
        return kind == "eager" or (kind == "sdpa" and (attention.materialises_scores or without_kernel))

    @property
    def budget_bytes(self) -> float:
        return self.cluster.device.memory_bytes * self.memory_share

    @property
    def host_budget_bytes(self) -> float:
        """Per node."""
        return self.cluster.host_memory_bytes * self.host_share


def rate_format(request: Request) -> str:
    """The format whose rate products have; float8 has one of its own, since not every layer multiplies in it."""
    policy = request.precision
    return "tf32" if policy.products == "tf32" else policy.weights


@dataclass(frozen=True)
class WireSize:
    """Bytes of a number on its way, and of a block of them besides: the scale of codes."""

    number: int
    block: int

    @staticmethod
    def of(name: str) -> WireSize:
        return WireSize(number_bytes(name), scale_bytes(name))


@dataclass(frozen=True, kw_only=True)
class ByteSizes:
    """Bytes per element of each kind, by the precision policy."""

    compute: int  # weights in all-gathers and matmuls
    master: int  # weights at rest
    gradient: int  # gradients as the optimizer sees them
    communication: int  # gradients in the buffers of collectives
    wire: WireSize  # gradients on their way
    gather: WireSize | None  # weights that travel as codes, on their way
    coding: int  # codes of gradients on their way out and in, and temporaries of encoding them
    activation: int
    residual: int  # the stream between blocks
    optimizer: float  # all optimizer states, per parameter
    update: int  # temporaries of the update, per parameter
    is_mixed: bool


_CODING = {"bfloat16": 2 + 2, "int8": 4 + 1 + 1, "float8_e4m3": 4 + 1 + 1}


def byte_sizes(request: Request) -> ByteSizes:
    """Byte sizes of a request."""
    policy = request.precision
    of = DTYPE_BYTES
    return ByteSizes(
        compute=of[policy.weights],
        master=of[policy.master_weights],
        gradient=of[policy.gradients],
        communication=of["float32"],
        wire=WireSize.of(policy.reduce),
        gather=WireSize.of(policy.gather) if policy.gather in CODED else None,
        coding=_CODING.get(policy.reduce, 0),
        activation=of[policy.activations],
        residual=of[policy.residual],
        optimizer=optimizer_bytes(request.workload, first=of[policy.first_moment], second=of[policy.second_moment]),
        update=update_bytes(
            request.workload, state_bytes=of[policy.second_moment], master_bytes=of[policy.master_weights]
        ),
        is_mixed=policy.is_mixed,
    )


def optimizer_bytes(workload: Workload, *, first: int, second: int) -> float:
    """State bytes per parameter: two moments, two quantised moments with scales, one momentum, or none."""
    average = 4.0 * workload.has_average
    if workload.optimizer == "adamw8bit":
        return 2 * (1 + 4 / QUANTISED_BLOCK) + average
    if workload.optimizer == "sgd":
        return average + (first if workload.momentum > 0 else 0)
    traits = OPTIMIZERS[workload.optimizer]
    return average + traits.has_first * first + traits.has_second * second


def update_bytes(workload: Workload, *, state_bytes: int, master_bytes: int) -> int:
    """Temporary bytes per parameter of an update: one list of tensors at a time with `foreach`, none otherwise.

    adamw: square roots of second moments; adam: those, or gradients with decay; sgd: gradients with decay.
    """
    if workload.optimizer_kernel != "foreach" or not OPTIMIZERS[workload.optimizer].has_kernels:
        return 0
    return {"adamw": state_bytes, "adam": max(state_bytes, master_bytes), "sgd": master_bytes}[workload.optimizer]
