"""The dtype of each component of the training state. Declarations only; the engine applies them.

| preset | weights (compute, gather) | master weights | gradients (reduced) | optimizer state | loss |
| ------ | ------------------------- | -------------- | ------------------- | --------------- | ---- |
| fp32   | float32                   | float32        | float32             | float32         | float32 |
| bf16   | bfloat16                  | float32        | float32             | float32         | float32 |
| fp16   | float16, loss scaled      | float32        | float32             | float32         | float32 |

With bf16 two components may be lower, both rounded stochastically: optimizer_state = "bfloat16" halves the moments;
master_weights = "bfloat16" keeps no float32 copy of the weights, and then gradients are bfloat16 too, since torch gives
a gradient its parameter's dtype. Communication stays float32. With bf16 and fp16 router = "float32" computes logits,
scores and top-k of the routers of experts in float32, from weights in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

DType = Literal["float32", "bfloat16", "float16"]
Preset = Literal["fp32", "bf16", "fp16"]


class PrecisionPolicy(BaseModel):
    """The resolved dtype of every component."""

    model_config = ConfigDict(frozen=True)

    weights: DType
    activations: DType
    gradients: DType
    communication: DType
    master_weights: DType
    optimizer_state: DType
    norm_statistics: DType
    loss: DType
    router: DType
    loss_scaling: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether weights are cast to another dtype for compute."""
        return self.weights != self.master_weights

    @property
    def is_low(self) -> bool:
        """Whether compute is in 16 bits."""
        return self.weights != "float32"

    @property
    def has_wide_router(self) -> bool:
        """Whether routers compute in float32 and the rest in 16 bits."""
        return self.is_low and self.router == "float32"

    @property
    def has_low_states(self) -> bool:
        """Whether the update itself rounds: moments or weights are stored in bfloat16."""
        return "bfloat16" in (self.optimizer_state, self.master_weights)


COMPONENTS = tuple(name for name in PrecisionPolicy.model_fields if name != "loss_scaling")

LOW_STATES = ("optimizer_state", "master_weights")  # components that may be bfloat16 with the preset bf16

_COMPUTE: dict[Preset, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def policy_of(preset: Preset) -> PrecisionPolicy:
    """The dtypes of a preset."""
    compute = _COMPUTE[preset]
    return PrecisionPolicy(
        weights=compute,
        activations=compute,
        gradients="float32",
        communication="float32",
        master_weights="float32",
        optimizer_state="float32",
        norm_statistics="float32",
        loss="float32",
        router=compute,
        loss_scaling=preset == "fp16",
    )


def resolve(preset: Preset, given: Mapping[str, DType]) -> PrecisionPolicy:
    """The preset with the given components, and the components that these imply."""
    implied: dict[str, DType] = {}
    if given.get("master_weights") == "bfloat16":
        implied["gradients"] = "bfloat16"
    return policy_of(preset).model_copy(update={**implied, **given})


def not_executed(preset: Preset, given: Mapping[str, DType]) -> list[str]:
    """Given components that this version's engine does not support."""
    policy = resolve(preset, given)
    supported: dict[str, DType] = {
        name: "bfloat16" for name in LOW_STATES if preset == "bf16" and given.get(name) == "bfloat16"
    }
    if given.get("router") == "float32":
        supported["router"] = "float32"
    built = resolve(preset, supported)
    return [name for name in COMPONENTS if getattr(policy, name) != getattr(built, name)]
