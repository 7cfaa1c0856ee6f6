"""Converts names and shapes between a checkpoint and the model, by transformers' own rules. It reads no files.

The only file that touches transformers' conversion machinery, which is public by name but young: test_pretrained.py and
test_hf_export.py fail when it moves. Loading: all renamings, then at most one converter, then the base-model prefix is
added or removed. Saving is the inverse: at most one converter, then the renamings, in reverse order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

Shape = tuple[int, ...]
Tensors = dict[str, torch.Tensor]


@dataclass
class Conversion:
    """A group of stored tensors converted together, such as the experts' matrices that become one 3-D tensor."""

    first_target: str  # transformers derives the other targets from this name
    converter: Any
    parts: list[tuple[str, str]] = field(default_factory=list)  # (pattern, key), in the order of conversion
    shapes: dict[str, Shape] = field(default_factory=dict)  # of every target

    def run(
        self, model: PreTrainedModel, load: Callable[[str], torch.Tensor], *, experts: slice | None = None
    ) -> Tensors:
        """Convert the tensors that `load` returns per key; `experts` selects entries of each pattern's list."""
        # a converter accumulates tensors: after a failed read, a shared one would keep them
        converter = copy.deepcopy(self.converter)
        for pattern, key in self._chosen(experts):
            converter.add_tensor(self.first_target, key, pattern, load(key))
        made = converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    @property
    def stacks_experts(self) -> bool:
        """Whether entry e of dimension 0 depends only on the e-th tensor of each pattern."""
        first, *rest = self.converter.operations
        joined_inside = all(type(op) is Concatenate and op.dim > 0 for op in rest)
        return type(first) is MergeModulelist and first.dim == 0 and joined_inside

    def _chosen(self, experts: slice | None) -> list[tuple[str, str]]:
        if experts is None:
            return self.parts
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for part in self.parts:
            by_pattern.setdefault(part[0], []).append(part)
        return [part for parts in by_pattern.values() for part in parts[experts]]


@dataclass
class LoadPlan:
    """Source of each of the model's tensors: a stored tensor or a conversion."""

    direct: dict[str, str] = field(default_factory=dict)  # name in the model -> stored name
    converted: dict[str, Conversion] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)  # stored name -> the name it would have in the model
    failed: dict[str, str] = field(default_factory=dict)  # name in the model -> why its conversion failed

    def shape(self, name: str, stored: Mapping[str, Shape]) -> Shape:
        """The shape `name` will have once loaded."""
        return self.converted[name].shapes[name] if name in self.converted else stored[self.direct[name]]


def plan_load(model: PreTrainedModel, stored: Mapping[str, Shape]) -> LoadPlan:
    """Map stored tensors to the model's; shapes of converted ones are computed on the meta device."""
    # with "legacy" rules (gamma, beta) on purpose: old checkpoints are read too
    renamings, converters = _split(get_model_conversion_mapping(model))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    plan, conversions = LoadPlan(), dict[str, Conversion]()
    # some renamings are stateful: keep transformers' order
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = _model_name(key, renamings=renamings, converters=converters, model=model, state=state)
        if name not in state:
            plan.unexpected[key] = name
        elif pattern is not None:
            conversion = conversions.setdefault(name, Conversion(name, by_pattern[pattern]))
            conversion.parts.append((pattern, key))
        elif plan.direct.setdefault(name, key) != key:
            plan.unexpected[key] = name
    for conversion in conversions.values():
        _plan_conversion(plan, conversion, model=model, stored=stored)
    return plan


def _model_name(
    key: str, *, renamings: list[Any], converters: list[Any], model: PreTrainedModel, state: Mapping[str, Any]
) -> tuple[str, str | None]:
    """The model's name for a stored one, and the converter's pattern that matched it."""
    prefix = model.base_model_prefix
    name, pattern = rename_source_key(key, renamings, converters, prefix, state)
    if name not in state and key in state:  # the rule matched a name that was already the model's
        name, pattern = rename_source_key(key, [], [], prefix, state)
    return name, pattern


def _plan_conversion(
    plan: LoadPlan, conversion: Conversion, *, model: PreTrainedModel, stored: Mapping[str, Shape]
) -> None:
    try:
        made = conversion.run(model, lambda key: torch.empty(stored[key], device="meta"))
    except Exception as error:  # any error of torch on inconsistent shapes
        plan.failed[conversion.first_target] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        return
    conversion.shapes = {name: tuple(value.shape) for name, value in made.items()}
    for name in made:
        plan.converted[name] = conversion


class SavePlan:
    """The model's tensors under the names and in the shapes that checkpoints of its family have on the hub.

    `units` are the sets of names that are converted together, most of size one. `convert` takes one full unit.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        self._unit_of: dict[str, str] = {}
        self._conversions: dict[str, Conversion] = {}
        self._renamed: dict[str, str] = {}
        ordered = sorted(names, key=dot_natural_key)
        renamings, converters = _reverse_rules(model)
        for name in ordered:
            self._join_unit(name, converters)
        for name in ordered:
            if self._unit_of[name] not in self._conversions:
                self._renamed[name] = _apply(renamings, name)
        self.shapes = self._shapes(renamings)

    @classmethod
    def build(cls, model: PreTrainedModel, names: Iterable[str]) -> SavePlan | None:
        """The plan, or None where the family's rules do not invert without loss."""
        names = list(names)
        try:
            plan = cls(model, names)
        except Exception:  # a rule without an inverse; transformers raises exceptions of many kinds
            return None
        return plan if plan._loads_back(names) else None

    def unit(self, name: str) -> frozenset[str]:
        """The names that are converted together with `name`, itself included."""
        conversion = self._conversions.get(self._unit_of[name])
        return frozenset(key for _, key in conversion.parts) if conversion else frozenset({name})

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """One unit of the model's tensors -> (stored name, tensor)."""
        conversion = self._conversions.get(self._unit_of[next(iter(tensors))])
        made = conversion.run(self._model, tensors.__getitem__) if conversion else tensors
        for name, tensor in made.items():
            yield self._renamed[name], tensor

    def _join_unit(self, name: str, converters: list[Any]) -> None:
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                self._unit_of[name] = target
                self._conversions.setdefault(target, Conversion(target, converter)).parts.append((pattern, name))
                return
        self._unit_of[name] = name

    def _shapes(self, renamings: list[Any]) -> dict[str, Shape]:
        state = self._model.state_dict()
        shapes = {stored: tuple(state[name].shape) for name, stored in self._renamed.items()}
        for conversion in self._conversions.values():
            made = conversion.run(self._model, lambda name: torch.empty_like(state[name], device="meta"))
            for name, tensor in made.items():
                self._renamed[name] = _apply(renamings, name)
                shapes[self._renamed[name]] = tuple(tensor.shape)
        return shapes

    def _loads_back(self, names: list[str]) -> bool:
        state = self._model.state_dict()
        plan = plan_load(self._model, self.shapes)
        found = plan.direct.keys() | plan.converted.keys()
        if len(self.shapes) != len(self._renamed) or plan.unexpected or plan.failed or set(names) - found:
            return False
        return all(plan.shape(name, self.shapes) == tuple(state[name].shape) for name in names)


def _reverse_rules(model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
    rules = get_model_conversion_mapping(model, add_legacy=False)
    # a prefix change only allows dropping a prefix on load; inverted it would add one
    kept = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return _split([rule.reverse_transform() for rule in reversed(kept)])


def _split(rules: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    rules = list(rules)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def _apply(renamings: list[Any], name: str) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
