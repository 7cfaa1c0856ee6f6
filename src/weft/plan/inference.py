"""Memory of inference: weights and key-value cache by precision, and the number of sequences that fit.

    weights    matrices of the blocks in the given precision; embeddings, head and norms in bfloat16
    cache      per token and layer 2 x key-value heads x head size, the compressed vector for latent attention;
               at most its window for a sliding layer; below 16 bits a 2-byte scale per vector of a head
Weights and heads are sharded over the devices (tensor parallelism), at least one key-value head per device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weft.core.cluster import Cluster
from weft.core.model_shape import BlockShape, ModelShape

WeightKind = Literal["bf16", "fp8", "int8", "int4"]
CacheKind = Literal["bf16", "fp8", "int8", "int4"]

GROUP = 128  # weights that share one 2-byte scale in int4
WEIGHT_BYTES: dict[WeightKind, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP}
CACHE_BYTES: dict[CacheKind, float] = {"bf16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
SCALE_BYTES = 2  # of each vector of a low-bit cache: a token's keys, or values, of one head
RESERVE = 0.05  # share of the device: activations, workspaces, fragmentation


@dataclass(frozen=True, kw_only=True)
class InferenceEstimate:
    """Bytes per device."""

    weights: WeightKind
    cache: CacheKind
    context: int
    concurrent: int
    num_devices: int
    weight_bytes: int
    cache_bytes_per_token: int  # without scales
    scale_bytes_per_token: int
    cache_bytes_per_sequence: int
    overhead_bytes: int
    capacity_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.concurrent * self.cache_bytes_per_sequence + self.overhead_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.capacity_bytes

    @property
    def max_concurrent(self) -> int:
        """Sequences of full context that fit beside the weights."""
        free = self.capacity_bytes - self.weight_bytes - self.overhead_bytes
        return max(0, free // max(self.cache_bytes_per_sequence, 1))

    def as_dict(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "kv_cache": self.cache,
            "context": self.context,
            "concurrent": self.concurrent,
            "devices": self.num_devices,
            "fits": self.fits,
            "max_concurrent": self.max_concurrent,
            "memory": {
                "total_bytes": self.total_bytes,
                "terms": {
                    "weights": self.weight_bytes,
                    "kv_cache": self.concurrent * self.cache_bytes_per_sequence,
                    "framework": self.overhead_bytes,
                },
            },
            "kv_cache_bytes_per_token": self.cache_bytes_per_token,
            "kv_cache_scale_bytes_per_token": self.scale_bytes_per_token,
            "kv_cache_bytes_per_sequence": self.cache_bytes_per_sequence,
            "capacity_bytes": self.capacity_bytes,
        }


def estimate_inference(
    shape: ModelShape,
    cluster: Cluster,
    *,
    weights: WeightKind = "bf16",
    cache: CacheKind = "bf16",
    concurrent: int = 1,
    context: int,
) -> InferenceEstimate:
    """Memory of one model over all devices of the cluster."""
    devices = cluster.num_devices
    kinds = list(zip(shape.kinds, shape.kind_counts, strict=True))
    per_token = sum(_codes_per_token(kind, devices, cache) * count for kind, count in kinds)
    scales = sum(_scales_per_token(kind, devices, cache) * count for kind, count in kinds)
    per_sequence = sum(
        (_codes_per_token(kind, devices, cache) + _scales_per_token(kind, devices, cache))
        * count
        * _cached_tokens(kind, context)
        for kind, count in kinds
    )
    device = cluster.device
    return InferenceEstimate(
        weights=weights,
        cache=cache,
        context=context,
        concurrent=concurrent,
        num_devices=devices,
        weight_bytes=math.ceil(weight_bytes(shape, weights) / devices),
        cache_bytes_per_token=per_token,
        scale_bytes_per_token=scales,
        cache_bytes_per_sequence=per_sequence,
        overhead_bytes=round(device.overhead_bytes + RESERVE * device.memory_bytes),
        capacity_bytes=device.memory_bytes,
    )


def weight_bytes(shape: ModelShape, weights: WeightKind) -> float:
    """Bytes of all weights of the model."""
    in_blocks = sum(
        count * sum(linear.copies * linear.in_features * linear.out_features for linear in kind.linears)
        for kind, count in zip(shape.kinds, shape.kind_counts, strict=True)
    )
    return in_blocks * WEIGHT_BYTES[weights] + (shape.num_parameters - in_blocks) * WEIGHT_BYTES["bf16"]


def _codes_per_token(block: BlockShape, devices: int, cache: CacheKind) -> int:
    """Cached bytes per token and device, without scales."""
    attention = block.attention
    if attention is None:
        return 0
    numbers = attention.latent_dim if attention.is_latent else attention.head_dim + attention.value_dim
    return _heads(block, devices) * round(numbers * CACHE_BYTES[cache])


def _scales_per_token(block: BlockShape, devices: int, cache: CacheKind) -> int:
    if block.attention is None or cache == "bf16":
        return 0
    return _heads(block, devices) * SCALE_BYTES * (1 if block.attention.is_latent else 2)


def _heads(block: BlockShape, devices: int) -> int:
    """Vectors of keys per token and device; a latent vector serves all heads and is replicated."""
    attention = block.attention
    if attention is None or attention.is_latent:
        return 1
    return math.ceil(attention.num_kv_heads / min(devices, attention.num_kv_heads))


def _cached_tokens(block: BlockShape, context: int) -> int:
    window = block.attention.window if block.attention else None
    return min(context, window) if window else context
