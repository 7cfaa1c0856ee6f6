"""Structure of a model: its repeated blocks, its tied weights and the unit of each parameter.

A unit is gathered at once by a sharding strategy: one block, or the root, which holds all other parameters.
It describes; it changes nothing. Names are the parameters' own (Hugging Face) names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from weft.core.errors import NoBlocksError

ROOT = "(root)"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """Blocks in order, ties as alias -> canonical name, and the unit of every canonical parameter."""

    blocks: tuple[str, ...]
    ties: dict[str, str]
    unit_of: dict[str, str]
    notes: tuple[str, ...] = field(default=())
    copies: dict[str, str] = field(default_factory=dict)  # local name -> the tied weight's first name, on another stage

    @property
    def units(self) -> tuple[str, ...]:
        return (*self.blocks, ROOT)


def describe(model: nn.Module, *, blocks: Sequence[str] | None = None) -> ModelLayout:
    """The layout of `model`; `blocks` overrides the detected blocks."""
    found = find_blocks(model) if blocks is None else _named_blocks(model, blocks)
    ties = find_ties(model)
    kept, notes = _keep_ties_together(model, found, ties)
    unit_of = {name: _unit_of(name, kept) for name, _ in model.named_parameters()}
    return ModelLayout(blocks=tuple(kept), ties=ties, unit_of=unit_of, notes=tuple(notes))


def require_blocks(layout: ModelLayout) -> None:
    """Raise without blocks: sharded strategies gather unit by unit, and the unit would be the full model."""
    if not layout.blocks:
        raise NoBlocksError(
            "the model has no repeated blocks, so sharding it would gather the full model at once",
            hint="name them: Engine(..., blocks=['encoder.layers']), or use zero = 0",
        )


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks: classes that HF declares indivisible, else the outermost lists of modules."""
    declared = getattr(model, "_no_split_modules", None) or ()
    by_class = [name for name, module in model.named_modules() if type(module).__name__ in set(declared)]
    blocks = _outermost(by_class) or _outermost(_members_of_lists(model))
    return [name for name in blocks if _has_parameters(model.get_submodule(name))]


def find_ties(model: nn.Module) -> dict[str, str]:
    """Every second and later name of a shared parameter, mapped to its first name."""
    first_name: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first_name.setdefault(id(parameter), name)
        if canonical != name:
            ties[name] = canonical
    return ties


def _members_of_lists(model: nn.Module) -> list[str]:
    """Elements of ModuleLists and Sequentials that hold at least two modules with parameters.

    A list in a list is opened: a list has no forward of its own to gather for.
    """
    members: list[str] = []
    opened: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) or name in opened:
            children = {key: child for key, child in module.named_children() if _has_parameters(child)}
            if len(children) >= 2 or (children and not isinstance(module, nn.Sequential)):
                names = {f"{name}.{key}" if name else key: child for key, child in children.items()}
                members += [child_name for child_name, child in names.items() if not isinstance(child, _CONTAINERS)]
                opened |= {child_name for child_name, child in names.items() if isinstance(child, _CONTAINERS)}
    return members


def _outermost(names: list[str]) -> list[str]:
    """Names that are not nested in another one: experts inside a block are not blocks."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in kept):
            kept.append(name)
    return kept


def _named_blocks(model: nn.Module, given: Sequence[str]) -> list[str]:
    """Check the blocks that the user named: each once, with parameters, none nested."""
    names = dict.fromkeys(name for entry in given for name in _expand(model, entry))
    for name in names:
        for other in names:
            if name.startswith(f"{other}."):
                raise NoBlocksError(f"{name!r} lies inside {other!r}", hint="blocks never nest: name one of the two")
    return [name for name in names if _has_parameters(model.get_submodule(name))]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _expand(model: nn.Module, name: str) -> list[str]:
    """Expand the name of a list to its members; return any other name as is."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise NoBlocksError(
            f"the model has no module {name!r}", hint="blocks are named as in model.named_modules()"
        ) from None
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return [f"{name}.{key}" for key, _ in module.named_children()]
    return [name]


def _keep_ties_together(model: nn.Module, blocks: list[str], ties: dict[str, str]) -> tuple[list[str], list[str]]:
    """Merge blocks that share a weight with another unit into the root unit, so no weight has two owners."""
    notes = []
    kept = list(blocks)
    for alias, canonical in ties.items():
        units = {_unit_of(alias, kept), _unit_of(canonical, kept)}
        if len(units) > 1:
            for unit in sorted(units - {ROOT}):
                kept.remove(unit)
                notes.append(f"{unit} shares {canonical} with another unit and is gathered with the root")
    return kept, notes


def _unit_of(parameter: str, blocks: Sequence[str]) -> str:
    # blocks never nest, so at most one is a prefix: search the prefixes of the name, not all blocks
    owners = set(blocks)
    parts = parameter.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:depth])
        if prefix in owners:
            return prefix
    return ROOT
