"""The reason why each replicated parameter is not sharded, and the replicated modules that may mix tokens.

Not the search (`finder`), nor the features that a layout rules out (`refusals`).
Every canonical parameter is sharded exactly once or named here with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from weft.models.layout import ModelLayout
from weft.models.tp.layout import Region, TensorLayout
from weft.models.tp.roles import linear_facts, looks_like_norm
from weft.models.tp.vocabulary import Ends

OUTSIDE = "outside the text's blocks"
OTHER_TOWERS = re.compile(r"vision|visual|image|audio|speech")
_ROUTERS = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.|$)")


@dataclass(kw_only=True)
class SearchResult:
    """The result of the search."""

    regions: list[Region] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)  # module -> reason
    classified: set[str] = field(default_factory=set)  # modules not to search again
    replicated_attention: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)


def mixers_of(model: nn.Module, layout: ModelLayout, found: SearchResult) -> tuple[str, ...]:
    """Replicated modules in blocks that may mix tokens: all except those known to work per token."""
    mixers = list(found.replicated_attention)
    for block in layout.blocks:
        for key, child in model.get_submodule(block).named_children():
            name = f"{block}.{key}"
            if _may_mix(child) and not _touches(name, found):
                mixers.append(name)
    return tuple(dict.fromkeys(mixers))


def is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _may_mix(module: nn.Module) -> bool:
    is_plain = looks_like_norm(module) or linear_facts("", module) is not None
    return not is_plain and any(
        not looks_like_norm(module.get_submodule(name.rpartition(".")[0])) for name, _ in module.named_parameters()
    )


def _touches(name: str, found: SearchResult) -> bool:
    """Whether something inside the module, or around it, is classified already."""
    return any(one == name or one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in found.classified)


def reasons_of(
    model: nn.Module, layout: TensorLayout, found: SearchResult, ends: Ends, *, tower: str
) -> dict[str, str]:
    """Canonical name of every parameter that is not sharded -> why."""
    sharded = set(sharded_parameters(layout, model))
    partial = {name for region in layout.regions for name in region.partial}
    sums = {f"{linear.name}.bias" for region in layout.regions for linear in region.linears if linear.side == "row"}
    reasons = {**found.declined, **_of_parameters(model, ends.reasons)}
    found_reasons = {}
    for name, _ in model.named_parameters():
        if name in sharded:
            continue
        if name in partial:
            found_reasons[name] = "used by every rank inside a region; its gradient is summed over ranks"
        elif name in sums:
            found_reasons[name] = "a bias added once, after the sum over ranks"
        else:
            found_reasons[name] = _nearest(name, reasons) or _by_kind(model, name, layout, tower)
    return found_reasons


def _of_parameters(model: nn.Module, reasons: dict[str, str]) -> dict[str, str]:
    """Reasons of modules as reasons of their parameters, by canonical name."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        canonical[id(parameter)]: reason
        for module, reason in reversed(reasons.items())
        for parameter in model.get_submodule(module).parameters()
    }


def _nearest(name: str, reasons: dict[str, str]) -> str | None:
    """The reason of a parameter, or of the closest module above it."""
    parts = name.split(".")
    prefixes = (".".join(parts[:depth]) for depth in range(len(parts), -1, -1))
    return next((reasons[prefix] for prefix in prefixes if prefix in reasons), None)


def _by_kind(model: nn.Module, name: str, layout: TensorLayout, tower: str) -> str:
    owner_name = name.rpartition(".")[0]
    owner = model.get_submodule(owner_name)
    mixer = next((one for one in layout.mixers if name.startswith(f"{one}.")), None)
    if (tower and not name.startswith(f"{tower}.")) or OTHER_TOWERS.search(name):
        return OUTSIDE
    if mixer is not None:
        return f"part of a {type(model.get_submodule(mixer)).__name__}, which weft does not shard"
    if looks_like_norm(owner) or any(looks_like_norm(module) for module in _above(model, owner_name)):
        return "a norm"
    if _ROUTERS.search(owner_name) or "router" in type(owner).__name__.lower() or name.endswith("expert_bias"):
        return "the router"
    if isinstance(owner, nn.Embedding):
        return "an embedding of something other than tokens"
    return f"in a {type(owner).__name__}, outside the regions that weft shards"


def _above(model: nn.Module, name: str) -> Iterator[nn.Module]:
    while name := name.rpartition(".")[0]:
        yield model.get_submodule(name)


def sharded_parameters(layout: TensorLayout, model: nn.Module) -> dict[str, str]:
    """Canonical name of every sharded parameter -> its region, table or head. Raises if there are two."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, str] = {}
    for owner, given in _sharded_names(layout, model):
        name = canonical[id(model.get_parameter(given))]
        if name in found and {found[name], owner} != {layout.embedding, layout.head}:
            raise ValueError(f"{name} is sharded by {found[name]} and by {owner}")
        found[name] = owner
    return found


def _sharded_names(layout: TensorLayout, model: nn.Module) -> list[tuple[str, str]]:
    """(owner, parameter): weights of linears, biases of column linears, bare tensors, wide norms, table and head."""
    names: list[tuple[str, str]] = []
    for region in layout.regions:
        for linear in region.linears:
            names.append((region.name, f"{linear.name}.weight"))
            if linear.side == "column" and getattr(model.get_submodule(linear.name), "bias", None) is not None:
                names.append((region.name, f"{linear.name}.bias"))
        names += [(region.name, tensor.name) for tensor in region.tensors]
        for norm in region.wide_norms:
            keys = dict(model.get_submodule(norm.name).named_parameters())
            names += [(region.name, f"{norm.name}.{key}") for key in keys]
    for end in filter(None, (layout.embedding, layout.head)):
        names += [(end, f"{end}.{key}") for key, _ in model.get_submodule(end).named_parameters()]
    return names
