"""The section `[float8]` of plan.toml: which matrices multiply in float8 (or float4), and by which recipe of scales."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from weft.core.config import Section

Float8Choice = Literal["none", "auto", "all"]
Float8Recipe = Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"]
GATHERED: Float8Recipe = "tensorwise"  # the recipe whose codes of a weight serve every product, wherever it is sharded
WHOLE: tuple[Float8Recipe, ...] = ("tensorwise", "delayed")  # one scale, whose codes serve every product
EMULATED: tuple[Float8Recipe, ...] = ("mxfp8", "nvfp4")  # on every device
RECIPES: tuple[Float8Recipe, ...] = get_args(Float8Recipe)


class Float8(Section):
    """Linear layers of the blocks that multiply in float8; weights, norms, head and loss keep their precision."""

    linears: Float8Choice = Field(default="none", description="none | auto (layers large enough to gain speed) | all")
    recipe: Float8Recipe = Field(
        default="tensorwise",
        description="what shares a scale: tensorwise (an operand) | delayed (an operand, by its largest magnitudes in "
        "the steps before) | rowwise (a row of an activation or gradient, a "
        "channel of a weight) | blockwise (1 x 128 elements, 128 x 128 of a weight; e4m3 throughout) | mxfp8 (32 "
        "elements, powers of two) | nvfp4 (16 elements in e2m1, scales in e4m3 and one float32); the last two emulated",
    )
    experts: Literal["none", "all"] = Field(
        default="none", description="none | all (products of experts that have them in groups follow the recipe too)"
    )
    gather: Literal["float8", "weights"] = Field(
        default="float8",
        description="dtype in which their sharded weights are all-gathered: float8 (half the bytes; tensorwise alone) "
        "| weights (the compute dtype; absent with another recipe: this)",
    )
    amax_history: int = Field(
        default=16, ge=1, le=1024, description="with recipe delayed: steps whose largest magnitudes set a scale"
    )
    margin: int = Field(
        default=0,
        ge=0,
        le=16,
        description="with recipe delayed: powers of two between that magnitude and the largest code",
    )
    measure_every: int = Field(
        default=0,
        ge=0,
        description="steps between measurements of each layer's quantisation error, overflow and underflow; 0: none",
    )
    fallback_error: float = Field(
        default=0.0,
        ge=0.0,
        description="error in a measured step beyond which a layer computes unquantised from then on; 0: none",
    )
