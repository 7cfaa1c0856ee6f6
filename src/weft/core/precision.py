"""Which number format each part of the training state uses. Declarations only; the engine carries them out.

| preset | weights (compute, gather) | master weights | gradients (reduced) | optimizer state | loss |
| ------ | ------------------------- | -------------- | ------------------- | --------------- | ---- |
| fp32   | float32                   | float32        | float32             | float32         | float32 |
| bf16   | bfloat16                  | float32        | float32             | float32         | float32 |
| fp16   | float16, loss scaled      | float32        | float32             | float32         | float32 |
"""

from __future__ import annotations

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
        return self.weights != self.master_weights


COMPONENTS = tuple(name for name in PrecisionPolicy.model_fields if name != "loss_scaling")

_COMPUTE: dict[Preset, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def policy_of(preset: Preset) -> PrecisionPolicy:
    """The preset spelt out."""
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
