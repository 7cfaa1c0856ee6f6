"""The section `[precision]` of plan.toml: a preset, and a key per component."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from weft.core.config import Section
from weft.core.precision import KEYS, Format, PrecisionPolicy, Preset, resolve
from weft.core.precision_presets import PRESET_NAMES


def _component(meaning: str) -> Any:
    return Field(default=None, description=f"{meaning}, if it differs from the preset")


class Precision(Section):
    """A preset, and formats of single components that differ from it: float32 | tf32 | bfloat16 | float16 |
    float8_e4m3 | float8_e5m2 | int8. A pair that is impossible is refused with the reason."""

    preset: Preset = Field(default="fp32", description=" | ".join(PRESET_NAMES))
    weights: Format | None = _component("weights in the forward and backward")
    products: Format | None = _component("operands of matrix products in the blocks; tf32 and float8_e4m3 too")
    activations: Format | None = _component("outputs of layers")
    residual: Format | None = _component("the residual stream")
    gradients: Format | None = _component("gradients as they accumulate and as the optimizer reads them")
    reduce: Format | None = _component(
        "gradients on their way over data-parallel ranks; bfloat16, float8_e4m3 and int8 too"
    )
    communication: Format | None = _component("another name of reduce")
    gather: Format | None = _component("sharded weights on their way; float8_e4m3 and int8 too")
    master_weights: Format | None = _component("weights that the optimizer updates")
    optimizer_state: Format | None = _component("both moments")
    first_moment: Format | None = _component("the moment of gradients")
    second_moment: Format | None = _component("the moment of squared gradients")
    norm_statistics: Format | None = _component("means and variances of norms")
    softmax: Format | None = _component("softmax of attention scores")
    router: Format | None = _component("logits, scores and top-k of routers of experts")
    experts: Format | None = _component("products of experts")
    dispatch: Format | None = _component("tokens on their way to experts; float8_e4m3 too (expert_parallel.wire)")
    combine: Format | None = _component("outputs of experts on their way back, and the gradients of both ways")
    aux_loss: Format | None = _component("losses of routers")
    logits: Format | None = _component("the head's product")
    loss: Format | None = _component("the loss")

    @property
    def given(self) -> dict[str, Format]:
        return {name: getattr(self, name) for name in KEYS if getattr(self, name) is not None}

    def policy(self) -> PrecisionPolicy:
        return resolve(self.preset, self.given)
