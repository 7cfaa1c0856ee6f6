"""Initial weights that depend on (seed, module name) only: equal at any layout and any world size.

One unit at a time of a meta-device skeleton gets real memory and is initialised by the model's own rules
(`_init_weights` of Hugging Face, `reset_parameters` of torch), children before parents; then it returns to meta.
So a rank holds at most one unit beyond its own shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from weft.models.build import constructed_value
from weft.models.layout import ROOT, ModelLayout
from weft.models.seeds import seed_generators

Index = tuple[slice, ...]
Reader = Callable[[Index], torch.Tensor]


class WeightSource(Protocol):
    """A source of weights: for each wanted parameter, a function from a global index to that slice."""

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]: ...


@runtime_checkable
class StoresBuffers(Protocol):
    """A source that has persistent buffers too, under names that its `readers` accept."""

    def buffer_names(self) -> list[str]: ...


class InitialWeights:
    """Random weights by the model's own rules. `skeleton` has its parameters on the meta device."""

    def __init__(self, skeleton: nn.Module, layout: ModelLayout, *, seed: int, device: torch.device) -> None:
        self._skeleton = skeleton
        self._layout = layout
        self._seed = seed
        self._device = device
        self.by_rule: list[str] = []  # parameters that the model's own code does not initialise

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        wanted = set(names)
        for unit in self._layout.units:
            mine = [name for name, owner in self._layout.unit_of.items() if owner == unit]
            if wanted.isdisjoint(mine):
                continue
            for name, tensor in self._initialise(unit, mine):
                if name in wanted:
                    yield name, tensor.__getitem__

    @torch.no_grad()
    def _initialise(self, unit: str, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        placed = {name: self._skeleton.get_parameter(name) for name in names}
        try:
            for name in names:
                _replace(self._skeleton, self._layout, name, self._blank(placed[name]))
            modules = list(_modules_children_first(self._skeleton, unit, self._layout))
            drawn_by = self._drawn_by(names, {name for name, _, _ in modules})
            with torch.random.fork_rng(devices=self._forked_devices()):
                for module_name, module, owner in modules:
                    for name, drawers in drawn_by.items():
                        # HF skips flagged tensors: the other owner of a tied weight must not redraw it
                        self._skeleton.get_parameter(name)._is_hf_initialized = module_name not in drawers  # type: ignore[attr-defined]
                    seed_generators(mixed_seed(self._seed, module_name))
                    _initialise_module(module, owner)
                for name in names:
                    parameter = self._skeleton.get_parameter(name)
                    self._fill_by_rule(name, parameter, constructed_value(placed[name]))
                    yield name, parameter.detach()
        finally:
            for name in names:
                _replace(self._skeleton, self._layout, name, placed[name])

    def _drawn_by(self, names: list[str], modules: set[str]) -> dict[str, set[str]]:
        """The modules that initialise each tied weight: the owner whose values transformers keeps (an embedding
        with its padding row of zeros, not the head) and the modules that contain only that owner."""
        sources = set((getattr(self._skeleton, "all_tied_weights_keys", None) or {}).values())
        drawn_by = {}
        for name in {canonical for canonical in self._layout.ties.values() if canonical in names}:
            owners = [name, *(alias for alias, canonical in self._layout.ties.items() if canonical == name)]
            here = [owner for owner in owners if owner.rpartition(".")[0] in modules]
            kept = next((owner for owner in here if owner in sources), name)
            others = {above for owner in owners if owner != kept for above in _above(owner)}
            drawn_by[name] = _above(kept) - others
        return drawn_by

    def _blank(self, like: nn.Parameter) -> nn.Parameter:
        """A parameter of NaN, which marks the values that the model's own code does not initialise."""
        values = torch.full(like.shape, float("nan"), dtype=like.dtype, device=self._device)
        return nn.Parameter(values, requires_grad=like.requires_grad)

    def _fill_by_rule(self, name: str, parameter: nn.Parameter, constructed: torch.Tensor | None) -> None:
        if not parameter.isnan().any():
            return
        if constructed is not None:
            parameter.copy_(constructed)
            return
        self.by_rule.append(name)
        seed_generators(mixed_seed(self._seed, name))
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.02)
        elif name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.zero_()

    def _forked_devices(self) -> list[int]:
        return [torch.cuda.current_device()] if self._device.type == "cuda" else []


def _above(parameter: str) -> set[str]:
    """The module that owns the parameter, and every module that contains it."""
    parts = parameter.split(".")[:-1]
    return {".".join(parts[:depth]) for depth in range(len(parts) + 1)}


def mixed_seed(seed: int, name: str) -> int:
    """A 63-bit seed from (seed, name), the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _modules_children_first(
    skeleton: nn.Module, unit: str, layout: ModelLayout
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """(name, module, the nearest HF model above it) of the unit's modules, in HF's order of initialisation."""
    blocks = set(layout.blocks)

    def walk(
        name: str, module: nn.Module, owner: nn.Module | None
    ) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
        owner = module if hasattr(module, "_init_weights") else owner
        for key, child in module.named_children():
            child_name = f"{name}.{key}" if name else key
            if child_name not in blocks:
                yield from walk(child_name, child, owner)
        yield name, module, owner

    if unit == ROOT:
        yield from walk("", skeleton, None)
        return
    owner: nn.Module | None = None
    for depth in range(unit.count(".") + 1):
        above = skeleton.get_submodule(".".join(unit.split(".")[:depth]))
        owner = above if hasattr(above, "_init_weights") else owner
    yield from walk(unit, skeleton.get_submodule(unit), owner)


def _initialise_module(module: nn.Module, owner: Any) -> None:
    if owner is not None:
        owner._init_weights(module)
    elif callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]


def _replace(model: nn.Module, layout: ModelLayout, name: str, parameter: nn.Parameter) -> None:
    """Set `parameter` at `name` and at every alias tied to it."""
    for alias in (name, *(alias for alias, canonical in layout.ties.items() if canonical == name)):
        owner, _, key = alias.rpartition(".")
        model.get_submodule(owner)._parameters[key] = parameter
