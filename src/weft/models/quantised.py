"""Weights of linear layers and experts as integer or float8 codes with scales: the compressed-tensors folder format.

Rounding to nearest, tensor by tensor, as an export streams them; no calibration data, no model in memory. A matrix
[rows, columns] becomes codes and one scale per row, or per group of columns of a row:

    weight ~ code * scale        scale = clip * max|group| / largest code, rounded to the dtype it is stored in

`clip` of int4 is the one of a few that errs least in squares, per group; others use 1. Transformers and vLLM read the
folder. Embeddings, the head, norms, routers, convolutions and matrices that do not divide into groups keep their dtype;
`Quantiser.kept` has the linear layers among them with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.core.errors import WeightsError
from weft.models.conversion import SavePlan, plan_load
from weft.models.ep.finder import find_expert_layout
from weft.models.pretrained import saved_tensors, stored_ties, unique_names

_WEIGHT = ".weight"
_WORD_BITS = 32
_CLIPS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76)
# Blocks of rows bound the memory of the search: each clip needs a few float32 copies of a block.
_BLOCK_NUMBERS = 4 * 1024 * 1024


@dataclass(frozen=True)
class WeightFormat:
    """A stored format of weights; `group_size` 0 is one scale per row."""

    num_bits: int
    is_float: bool = False
    group_size: int = 0
    clips: tuple[float, ...] = (1.0,)

    @property
    def largest(self) -> float:
        """The value that the largest weight of a group is mapped to."""
        return torch.finfo(torch.float8_e4m3fn).max if self.is_float else 2 ** (self.num_bits - 1) - 0.5

    def config(self) -> dict[str, Any]:
        """`weights` of a config group, in compressed-tensors' words."""
        strategy = {"strategy": "group", "group_size": self.group_size} if self.group_size else {"strategy": "channel"}
        kind = "float" if self.is_float else "int"
        return {"num_bits": self.num_bits, "type": kind, "symmetric": True, "dynamic": False} | strategy


_GROUP_SIZES = (128, 64, 32)

FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(8),
    "int4": WeightFormat(4, group_size=128, clips=_CLIPS),
    "float8": WeightFormat(8, is_float=True),
}


def quantise(weight: Tensor, form: WeightFormat, *, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] (int8 or float8) and scales [rows, groups] of a matrix, in blocks of rows."""
    block = max(1, _BLOCK_NUMBERS // weight.shape[1])
    made = [_quantise_rows(rows, form, scale_dtype) for rows in torch.split(weight, block)]
    return torch.cat([codes for codes, _ in made]), torch.cat([scales for _, scales in made])


def _quantise_rows(rows: Tensor, form: WeightFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = form.group_size or rows.shape[1]
    groups = rows.float().reshape(rows.shape[0], -1, width)
    largest = groups.abs().amax(-1, keepdim=True) / form.largest
    codes, scale = _rounded(groups, form.clips[0] * largest, form, scale_dtype)
    if len(form.clips) > 1:
        error = _squared_error(groups, codes, scale)
        for clip in form.clips[1:]:
            other_codes, other_scale = _rounded(groups, clip * largest, form, scale_dtype)
            other_error = _squared_error(groups, other_codes, other_scale)
            better = other_error < error
            codes, scale = torch.where(better, other_codes, codes), torch.where(better, other_scale, scale)
            error = torch.where(better, other_error, error)
    return codes.flatten(1), scale.squeeze(-1).to(scale_dtype)


def _rounded(groups: Tensor, scale: Tensor, form: WeightFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes, and the scale as its dtype holds it. A group of zeros gets the least scale, and codes 0."""
    scale = scale.clamp_min(torch.finfo(scale_dtype).tiny).to(scale_dtype).float()
    return _round(groups / scale, form), scale


def _squared_error(groups: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return (codes.float() * scale - groups).square().sum(-1, keepdim=True)


def _round(values: Tensor, form: WeightFormat) -> Tensor:
    if form.is_float:
        return values.clamp(-form.largest, form.largest).to(torch.float8_e4m3fn)
    top = 2 ** (form.num_bits - 1)
    return values.round().clamp(-top, top - 1).to(torch.int8)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """Signed codes [rows, columns] as int32 words [rows, words], lowest bits first, offset to be unsigned."""
    per_word = _WORD_BITS // num_bits
    unsigned = (codes.to(torch.int32) + 2 ** (num_bits - 1)).reshape(codes.shape[0], -1, per_word)
    words = torch.zeros(unsigned.shape[:2], dtype=torch.int32)
    for place in range(per_word):
        words |= unsigned[..., place] << (num_bits * place)
    return words


class Quantiser:
    """Decides which stored tensors of a model become codes, and makes them.

    Groups have the largest of a few sizes that divides the inputs of every matrix that some size divides.
    """

    def __init__(self, model: PreTrainedModel, form: WeightFormat) -> None:
        self.format = _grouped(form, model)
        self.kept: dict[str, str] = {}  # linear layer of the model -> why it keeps its dtype
        self.num_quantised = 0
        self._sources = self._find(model)  # stored name -> name in the model

    @property
    def model_names(self) -> frozenset[str]:
        """The model's tensors that become codes: an export must not cast them before."""
        return frozenset(self._sources.values())

    def tensors(self, name: str, tensor: Tensor, *, scale_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What is stored for one tensor under its stored name."""
        if name not in self._sources:
            yield name, tensor
            return
        self.num_quantised += tensor.numel()
        codes, scales = quantise(tensor, self.format, scale_dtype=scale_dtype)
        if self.format.is_float:
            yield name, codes
        else:
            yield f"{name}_packed", pack(codes, self.format.num_bits)
            yield f"{name}_shape", torch.tensor(tensor.shape)
        yield f"{name}_scale", scales

    def record(self) -> dict[str, Any]:
        """What was quantised, and which layers keep their dtype, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.kept.items():
            by_reason.setdefault(reason, []).append(name)
        return {"quantised_parameters": self.num_quantised, "group_size": self.format.group_size, "kept": by_reason}

    def config(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        # float8 products take float8 inputs: a scale per token, computed as the model runs
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": self.format.config(),
            "input_activations": inputs if self.format.is_float else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if self.format.is_float else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": sorted(self.kept),
            "config_groups": {"group_0": group},
        }

    def _find(self, model: PreTrainedModel) -> dict[str, str]:
        linears = {f"{name}{_WEIGHT}": name for name, module in model.named_modules() if _is_linear(module)}
        state = model.state_dict()
        ties = stored_ties(model)
        save_plan = SavePlan.build(model, {ties.get(name, name) for name in unique_names(model)})
        own = {name: tuple(tensor.shape) for name, tensor in saved_tensors(model).items()}
        shapes = save_plan.shapes if save_plan is not None else own
        plan = plan_load(model, shapes)
        experts = {name for name in _expert_parameters(model) if state[name].ndim == 3}
        found: dict[str, str] = {}
        for weight, module in linears.items():
            reason = self._why_kept(model, module, plan.direct.get(weight), state[weight])
            if reason:
                self.kept[module] = reason
            else:
                found[plan.direct[weight]] = weight
        for name in sorted(experts & plan.converted.keys()):
            conversion = plan.converted[name]
            keys = [key for _, key in conversion.parts]
            if conversion.stacks_experts and all(self._fits(shapes[key]) and key.endswith(_WEIGHT) for key in keys):
                found |= dict.fromkeys(keys, name)
        for name in sorted(experts - set(found.values())):
            self.kept[name] = "experts are not stored as one matrix each, or do not divide into groups"
        if not found:
            raise WeightsError(
                f"{type(model).__name__} has no linear layer that can be stored in {self.format.num_bits} bits",
                hint=f"these keep their dtype: {', '.join(self.kept) or 'all'}; leave --format out",
            )
        return found

    def _why_kept(self, model: PreTrainedModel, module: str, stored: str | None, weight: Tensor) -> str:
        """Empty if the linear layer becomes codes."""
        head = model.get_output_embeddings()
        if head is not None and model.get_submodule(module) is head:
            return "the head"
        last = module.rsplit(".", 1)[-1]
        if last == "gate" or "router" in last or last.endswith("expert_gate"):
            return "a router"
        if stored is None or not stored.endswith(_WEIGHT):
            return "transformers converts it on load"
        if not self._fits(tuple(weight.shape)):
            return f"its {weight.shape[1]} inputs do not divide into groups"
        return ""

    def _fits(self, shape: tuple[int, ...]) -> bool:
        unit = self.format.group_size or (1 if self.format.is_float else _WORD_BITS // self.format.num_bits)
        return len(shape) == 2 and shape[1] % unit == 0


def _grouped(form: WeightFormat, model: PreTrainedModel) -> WeightFormat:
    if not form.group_size:
        return form
    columns = {module.in_features for module in model.modules() if _is_linear(module)}
    columns |= {model.get_parameter(name).shape[-1] for name in _expert_parameters(model)}
    sizes = [size for size in _GROUP_SIZES if size <= form.group_size]
    divisible = {width for width in columns if any(width % size == 0 for size in sizes)}
    size = next((one for one in sizes if all(width % one == 0 for width in divisible)), sizes[-1])
    return replace(form, group_size=size)


def _expert_parameters(model: PreTrainedModel) -> list[str]:
    return [name for layer in find_expert_layout(model).layers for name in layer.parameters]


def _is_linear(module: nn.Module) -> bool:
    # compressed-tensors targets the class by name: subclasses are other layers to it
    return type(module) is nn.Linear
