"""Weights of linear layers and experts as integer or float8 codes with scales: the compressed-tensors folder format.

Tensor by tensor, as an export streams them, without the model in memory: rounded to nearest (`weight_codes`), but for
tensors whose codes a calibration has made before (`train/calibration.py`). Transformers and vLLM read the folder.
Embeddings, the head, norms, routers, convolutions and matrices that do not divide into groups keep their dtype;
`Quantiser.kept` has the linear layers among them with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.core.errors import WeightsError
from weft.models.conversion import SavePlan, plan_load
from weft.models.ep.finder import find_expert_layout
from weft.models.pretrained import saved_tensors, stored_ties, unique_names
from weft.models.weight_codes import GROUP_SIZES, WORD_BITS, WeightFormat, pack, quantise

_WEIGHT = ".weight"


class Quantiser:
    """Decides which stored tensors of a model become codes, and makes them.

    Groups have the largest of a few sizes that divides the inputs of every matrix that some size divides.
    """

    def __init__(self, model: PreTrainedModel, form: WeightFormat) -> None:
        self.format = _grouped(form, model)
        self.kept: dict[str, str] = {}  # linear layer of the model -> why it keeps its dtype
        self.num_quantised = 0
        self._made: dict[str, tuple[Tensor, Tensor]] = {}  # stored name -> codes and scales of a calibration
        self._sources = self._find(model)  # stored name -> name in the model

    @property
    def model_names(self) -> frozenset[str]:
        """The model's tensors that become codes: an export must not cast them before."""
        return frozenset(self._sources.values())

    def take(self, made: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Use these codes and scales for tensors [rows, columns] or [experts, rows, columns] of the model.

        They become stored ones as the weights do: no conversion of stacked experts touches columns.
        """
        codes = self._stored({name: one for name, (one, _) in made.items()})
        scales = self._stored({name: one for name, (_, one) in made.items()})
        self._made |= {name: (one, scales[name]) for name, one in codes.items()}

    def tensors(self, name: str, tensor: Tensor, *, scale_dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """What is stored for one tensor under its stored name."""
        if name not in self._sources:
            yield name, tensor
            return
        self.num_quantised += tensor.numel()
        made = self._made.pop(name, None)
        codes, scales = made or quantise(tensor, self.format, scale_dtype=scale_dtype)
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

    def _stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors under the names, and in the parts, that are stored."""
        if self._save_plan is None:
            return dict(tensors)
        found: dict[str, Tensor] = {}
        for unit in {self._save_plan.unit(name) for name in tensors}:
            if unit <= tensors.keys():
                found |= dict(self._save_plan.convert({name: tensors[name] for name in unit}))
        return found

    def _find(self, model: PreTrainedModel) -> dict[str, str]:
        linears = {f"{name}{_WEIGHT}": name for name, module in model.named_modules() if _is_linear(module)}
        state = model.state_dict()
        ties = stored_ties(model)
        save_plan = self._save_plan = SavePlan.build(model, {ties.get(name, name) for name in unique_names(model)})
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
        unit = self.format.group_size or (1 if self.format.is_float else WORD_BITS // self.format.num_bits)
        return len(shape) == 2 and shape[1] % unit == 0


def _grouped(form: WeightFormat, model: PreTrainedModel) -> WeightFormat:
    if not form.group_size:
        return form
    columns = {module.in_features for module in model.modules() if _is_linear(module)}
    columns |= {model.get_parameter(name).shape[-1] for name in _expert_parameters(model)}
    sizes = [size for size in GROUP_SIZES if size <= form.group_size]
    divisible = {width for width in columns if any(width % size == 0 for size in sizes)}
    size = next((one for one in sizes if all(width % one == 0 for width in divisible)), sizes[-1])
    return replace(form, group_size=size)


def _expert_parameters(model: PreTrainedModel) -> list[str]:
    return [name for layer in find_expert_layout(model).layers for name in layer.parameters]


def _is_linear(module: nn.Module) -> bool:
    # compressed-tensors targets the class by name: subclasses are other layers to it
    return type(module) is nn.Linear
