"""The format of each component of training: one resolved policy, and the table of formats that can be executed.

    weights at rest (master_weights) -> weights (cast, gather) -> products -> activations, residual -> logits -> loss
    gradients (as stored and accumulated) <- reduce (over data-parallel ranks); first_moment, second_moment
    router -> dispatch -> experts -> combine, aux_loss

Presets (`core/precision_presets.py`) name some components; most of the others follow `weights`. Declarations only: the
engine applies them, and looks up what it really used (`engine/measure/dtypes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from weft.core.precision_presets import PRESETS, PresetName
from weft.core.wire_bytes import CODED

Format = Literal["float32", "tf32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float4_e2m1", "int8"]
FORMATS: tuple[Format, ...] = get_args(Format)
Preset = PresetName
E4M3: Format = "float8_e4m3"
E2M1: Format = "float4_e2m1"
LOW_PRODUCTS = (E4M3, E2M1)  # operands that [float8] describes


class PrecisionPolicy(BaseModel):
    """The resolved format of every component."""

    model_config = ConfigDict(frozen=True)

    weights: Format
    products: Format
    activations: Format
    residual: Format
    gradients: Format
    reduce: Format
    gather: Format
    master_weights: Format
    first_moment: Format
    second_moment: Format
    norm_statistics: Format
    softmax: Format
    router: Format
    experts: Format
    dispatch: Format
    combine: Format
    aux_loss: Format
    logits: Format
    loss: Format

    @property
    def has_coded_sums(self) -> bool:
        """Whether gradients are rounded on their way over the ranks; sums are made in float32 or better."""
        return self.reduce != "float32"

    @property
    def loss_scaling(self) -> bool:
        """Whether losses are scaled, since gradients have the small range of float16."""
        return self.weights == "float16"

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
    def has_wide_logits(self) -> bool:
        """Whether the head computes in float32 and the rest in 16 bits."""
        return self.is_low and self.logits == "float32"

    @property
    def has_wide_residual(self) -> bool:
        """Whether blocks add to a float32 stream what they compute in 16 bits."""
        return self.residual != self.weights

    @property
    def has_low_moments(self) -> bool:
        return "bfloat16" in (self.first_moment, self.second_moment)

    @property
    def has_low_states(self) -> bool:
        """Whether the update itself rounds: moments or weights are stored in bfloat16."""
        return self.has_low_moments or self.master_weights == "bfloat16"

    @property
    def has_own_gradients(self) -> bool:
        """Whether gradients have another dtype than the weights that the optimizer updates."""
        return self.gradients != self.master_weights


COMPONENTS = tuple(PrecisionPolicy.model_fields)
# keys that set several components, or are an older name of one
GROUPS: dict[str, tuple[str, ...]] = {
    "optimizer_state": ("first_moment", "second_moment"),
    "communication": ("reduce",),
}
KEYS = (*COMPONENTS, *GROUPS)
LOW_STATES = ("optimizer_state", "first_moment", "second_moment", "master_weights")  # bfloat16 implies the preset bf16

# components that have the format of the weights unless they are named
_FOLLOWERS = ("products", "activations", "residual", "gather", "router", "experts", "dispatch", "combine", "logits")


def policy_of(preset: Preset) -> PrecisionPolicy:
    """The formats of a preset."""
    return resolve(preset, {})


def resolve(preset: Preset, given: Mapping[str, Format]) -> PrecisionPolicy:
    """The preset with the given components, and the components that these imply."""
    preset_names, own = _expanded(PRESETS[preset].components), _expanded(given)
    if "weights" in own:  # other weights than the preset's: what it says beside them does not apply
        preset_names = {key: value for key, value in preset_names.items() if key not in _FOLLOWERS}
    named = {**preset_names, **own}
    follows = named.get("weights", "float32")
    found: dict[str, Format] = dict.fromkeys(COMPONENTS, "float32")
    found |= dict.fromkeys(_FOLLOWERS, follows)
    if named.get("master_weights") == "bfloat16":
        found["gradients"] = "bfloat16"  # torch gives a gradient its parameter's dtype
    return PrecisionPolicy.model_validate({**found, **named})


def _expanded(given: Mapping[str, Format]) -> dict[str, Format]:
    """Components by name; those of a group unless they are named themselves."""
    groups = {part: given[key] for key, parts in GROUPS.items() if key in given for part in parts}
    return groups | {key: value for key, value in given.items() if key not in GROUPS}


_NO_UNITS = "{0} needs a scale per tensor or block, which only products and exchanges of experts have"
_ONE_KERNEL = "torch's kernels compute it in float32, whatever their inputs"
_EXPERTS = "experts multiply as the rest, or in the format of its products"
_MODEL = "it has the format of the weights"
# what else may be said of a component than "the same as weights": formats that are executed, and why others are not
_FREE: dict[str, tuple[tuple[Format, ...], str]] = {
    "weights": (("float32", "bfloat16", "float16"), _NO_UNITS),
    "master_weights": (("float32", "bfloat16"), "float16 underflows in updates, and 8 bits lose them"),
    "first_moment": (("float32", "bfloat16"), "for 8-bit moments use train.optimizer = 'adamw8bit'; float16 overflows"),
    "second_moment": (
        ("float32", "bfloat16"),
        "for 8-bit moments use train.optimizer = 'adamw8bit'; float16 underflows",
    ),
    "gradients": (("float32", "bfloat16"), "accumulated gradients need the range of float32"),
    "reduce": (
        ("float32", "bfloat16", "float8_e4m3", "int8"),
        "gradients of the ranks need the range of float32, or a scale per block",
    ),
    "norm_statistics": (("float32",), _ONE_KERNEL),
    "softmax": (("float32",), _ONE_KERNEL),
    "aux_loss": (("float32",), "sums over a batch's tokens lose small terms in less"),
    "loss": (("float32",), "sums over a batch's tokens lose small terms in less"),
}


def impossible(policy: PrecisionPolicy) -> Iterator[tuple[str, str]]:
    """Formats that make no sense together, as (sentence, hint)."""
    for name, (formats, why) in _FREE.items():
        value = getattr(policy, name)
        if value not in formats:
            yield (
                f"precision.{name} = {value!r}: {why.format(value)}",
                f"set precision.{name} = {' or '.join(map(repr, formats))}",
            )
    for name, formats, why in _tied(policy):
        value = getattr(policy, name)
        if value not in formats:
            allowed = " or ".join(repr(one) for one in dict.fromkeys(formats))
            yield (
                f"precision.{name} = {value!r} with weights in {policy.weights}: {why}",
                f"set precision.{name} = {allowed}",
            )


def _tied(policy: PrecisionPolicy) -> Iterator[tuple[str, tuple[Format, ...], str]]:
    """(component, formats that go with the weights, why no other)."""
    weights = policy.weights
    is_bf16 = weights == "bfloat16"
    multiplied: tuple[Format, ...] = (weights, *(("tf32",) if weights == "float32" else ()))
    low: tuple[Format, ...] = ("float32", "bfloat16") if is_bf16 else ("float32",)
    yield "products", (*multiplied, *(LOW_PRODUCTS if is_bf16 else ())), "units multiply one pair of operand formats"
    for name in ("activations", "combine"):
        yield name, (weights,), _MODEL
    yield "experts", (weights, *((policy.products,) if policy.products in LOW_PRODUCTS else ())), _EXPERTS
    yield "gather", (weights, *CODED), "weights are cast before they travel, or travel as 8-bit codes"
    yield "dispatch", (weights, E4M3), "tokens travel as computed, or packed in float8"
    for name in ("router", "logits"):
        yield name, (weights, "float32"), "it is computed as the rest, or in float32"
    yield "residual", (weights, "float32"), "blocks add to it what they compute"
    for name in ("master_weights", "first_moment", "second_moment", "gradients"):
        yield name, low, "bfloat16 there needs weights in bfloat16"
