"""`Cluster`: devices and the links between them, for the cost model. Values only; `hardware` has the data.

Neighbouring devices share a node: device i is on node i // devices_per_node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RateCurve:
    """Share of a device's peak that a matmul reaches: saturates with size, never above `best`.

    share(flops) = best * flops / (flops + half_flops), with the FLOPs of the single matmul.
    """

    best: float
    half_flops: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Peaks are dense (no sparsity)."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]  # by dtype: float32, tf32, bfloat16, float16, float8
    rates: Mapping[str, RateCurve]  # by dtype, for matmuls
    memory_share: float = 0.85  # share of memory_bytes_per_s that simple kernels reach
    overhead_bytes: int = 0  # context and libraries, outside the allocator

    @property
    def is_cpu(self) -> bool:
        return self.name.lower().startswith("cpu")


@dataclass(frozen=True, kw_only=True)
class Link:
    """alpha-beta: a message of n bytes takes latency_s + n / bytes_per_s. Per device and direction, as achieved."""

    name: str
    latency_s: float
    bytes_per_s: float
    duplex_share: float = 1.0  # of bytes_per_s that each direction has while both are in use


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices."""

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    inside: Link  # between devices of a node
    between: Link  # between nodes, per device
    host: Link  # device to its host's memory
    host_memory_bytes: int = 0  # per node
    nvme_bytes_per_s: float = 0.0  # per node, reads and writes together; 0 without NVMe
    host_memory_bytes_per_s: float = 1e11  # per node, as achieved
    host_cores_per_device: float = 8.0  # of a full node: jobs on its other devices have theirs
    host_core_parameters_per_s: float = 7.8e8  # AdamW in float32 on one core
    calibrated: bool = False  # measured figures have replaced the catalogue's
    sources: tuple[str, ...] = field(default=())

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node
