"""Finds the TensorLayout of a causal LM: its regions, their shards, and the reason for each replicated parameter.

    a region = a module whose every parameter is understood (`attention`, `mla`, `mlp`, `experts`)
             + evidence: the config's own tp plan, or weft's list of families compared with one rank
             + sizes that add up (`checks`)

Everything else stays replicated, with a reason. The finder knows no degree and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.models.layout import ModelLayout
from weft.models.tp.adapters import with_adapters
from weft.models.tp.attention import attention_region, split_attention_region
from weft.models.tp.checks import wrong_arithmetic
from weft.models.tp.experts import experts_region
from weft.models.tp.heads import OTHER_STATES
from weft.models.tp.layout import Region, TensorLayout
from weft.models.tp.mla import latent_region
from weft.models.tp.mlp import loose_mlp_region, mlp_region
from weft.models.tp.reasons import OTHER_TOWERS, SearchResult, is_inside, mixers_of, reasons_of
from weft.models.tp.refusals import refusals_of
from weft.models.tp.roles import DeclinedError, Site, is_norm, is_residual_norm, linear_facts, looks_like_norm
from weft.models.tp.vocabulary import find_ends
from weft.zoo import tensor_exceptions as known

_WORDS = {"attention": "attention", "mlp": "a feed-forward layer", "experts": "experts"}
_SHARD_STYLES = re.compile(r"colwise|rowwise|moe_tp_experts")


def find_tensor_layout(model: nn.Module, layout: ModelLayout) -> TensorLayout:
    """Where `model` can be sharded; `layout` is `models.layout.describe(model)`."""
    config = text_config(model)
    model_type, hidden_size = str(getattr(config, "model_type", "")), _number(config, "hidden_size")
    tower, why_replicated = text_tower(model, layout.blocks), known.REPLICATED.get(model_type)
    site = Site(
        name=tower, module=model.get_submodule(tower), hidden_size=hidden_size, model_type=model_type, config=config
    )
    ends = find_ends(model, vocabulary=_number(config, "vocab_size"), why_replicated=why_replicated)
    found = SearchResult(declined={tower: why_replicated} if why_replicated else {})
    text = replace(layout, blocks=blocks_of_text(layout.blocks, tower))
    if why_replicated is None:
        _search(site, _Finder(model, text, config), found)
        _decline_kin(model, text, found)
    mixers = mixers_of(model, text, found)
    regions = tuple(with_adapters(model, region) for region in found.regions)
    bare = TensorLayout(
        regions=regions, embedding=ends.embedding, head=ends.head, hidden_size=hidden_size, replicated={},
        mixers=mixers, norms=tuple(name for name in found.norms if not is_inside(name, mixers)),
    )  # fmt: skip
    explained = replace(bare, replicated=reasons_of(model, bare, found, ends, tower=tower))
    return replace(explained, refusals=refusals_of(model, layout, explained, model_type=model_type, ends=ends))


class _Finder:
    """Facts of one model that the search through its modules reads."""

    def __init__(self, model: nn.Module, layout: ModelLayout, config: Any) -> None:
        self.model, self.blocks = model, set(layout.blocks)
        self.plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        self.ties = set(layout.ties.values())

    def is_in_block(self, region: Region) -> bool:
        return any(
            f"{region.name}.".startswith(f"{block}.") or block.startswith(f"{region.name}.") for block in self.blocks
        )

    def vouched(self, region: Region, model_type: str) -> bool:
        """Whether the family was compared with one rank, or its config's plan shards the same modules."""
        names = [linear.name for linear in region.linears] + [tensor.name for tensor in region.tensors]
        return model_type in known.COMPARED or all(self._planned(name) for name in names)

    def _planned(self, name: str) -> bool:
        general = re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}")
        return any(
            general.endswith(f".{pattern}") and _SHARD_STYLES.search(style) for pattern, style in self.plan.items()
        )


Finder = Callable[[Site], Region | None]
_FINDERS: tuple[tuple[str, Finder], ...] = (
    ("attention", latent_region),
    ("attention", attention_region),
    ("experts", experts_region),
    ("mlp", mlp_region),
)
# regions that span several children of a module
_PAIRS: tuple[tuple[str, Finder], ...] = (("attention", split_attention_region), ("mlp", loose_mlp_region))


def _search(site: Site, facts: _Finder, found: SearchResult) -> None:
    """Classify one module: a norm, a region, declined, or a container to open."""
    if looks_like_norm(site.module):
        if is_norm(site.module) and is_residual_norm(site.module, site.hidden_size):
            found.norms.append(site.name)
        return
    if not any(True for _ in site.module.parameters()) or linear_facts(site.name, site.module) is not None:
        return
    if any(_is_classified(site, kind, finder, facts, found) for kind, finder in _FINDERS):
        return
    for kind, finder in _PAIRS:
        _is_classified(site, kind, finder, facts, found)
    for key, child in site.module._modules.items():
        if child is not None and site.child(key) not in found.classified and not OTHER_TOWERS.search(key):
            _search(replace(site, name=site.child(key), module=child), facts, found)


def _is_classified(site: Site, kind: str, finder: Finder, facts: _Finder, found: SearchResult) -> bool:
    """Whether the finder recognised the module: as a region, or as one that is declined."""
    try:
        region = finder(site)
        if region is None:
            return False
        _require(region, site, facts, is_alone=(kind, finder) in _FINDERS)
        found.regions.append(region)
        found.classified |= {*region.entries, *(linear.name for linear in region.linears)}
    except DeclinedError as error:
        names = error.at or (site.name,)
        found.declined |= dict.fromkeys(names, f"{_WORDS[kind]} that weft does not shard: {error}")
        found.classified |= set(names)
        if kind == "attention":
            found.replicated_attention += names[:1]
    return True


def _require(region: Region, site: Site, facts: _Finder, *, is_alone: bool) -> None:
    """Decline a region for reasons beyond its structure. `is_alone`: the region is the full module at the site."""
    reason = wrong_arithmetic(region, facts.model, hidden_size=site.hidden_size)
    if reason is None and not facts.is_in_block(region):
        reason = "it is outside the repeated blocks"
    if reason is None and not facts.vouched(region, site.model_type):
        reason = "its family was not compared with a run at tp = 1, and its config has no plan for it"
    if reason is None and any(f"{linear.name}.weight" in facts.ties for linear in region.linears):
        reason = "another module shares its weights"
    if reason is not None:
        raise DeclinedError(
            reason, at=() if is_alone else (region.entries[0], *(linear.name for linear in region.linears))
        )


def _decline_kin(model: nn.Module, layout: ModelLayout, found: SearchResult) -> None:
    """Decline all attention of a class if one of that class is declined: they may share state."""
    mixers = (name for name in mixers_of(model, layout, found) if not _is_cross(found.declined.get(name, "")))
    replicated = {type(model.get_submodule(name)): name for name in mixers}
    for region in [one for one in found.regions if one.kind == "attention"]:
        kin = replicated.get(type(model.get_submodule(region.name)))
        if kin is not None:
            found.regions.remove(region)
            names = (region.name, *(linear.name for linear in region.linears))
            found.declined |= dict.fromkeys(names, f"attention of the same class as {kin}, which is replicated")
            found.replicated_attention.append(region.name)


def _is_cross(reason: str) -> bool:
    return reason.endswith(OTHER_STATES)


def text_config(model: nn.Module) -> Any:
    """The config of the text part, or None."""
    config = getattr(model, "config", None)
    try:
        return config.get_text_config() if config is not None else None
    except (AttributeError, ValueError):
        return config


def text_tower(model: nn.Module, blocks: Sequence[str]) -> str:
    """The name of the module with the text's blocks: Hugging Face's decoder, or else the full model."""
    try:
        tower = model.get_decoder()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return ""
    name = next((name for name, module in model.named_modules() if module is tower), "")
    return name if any(block.startswith(f"{name}.") for block in blocks) else ""


def blocks_of_text(blocks: Sequence[str], tower: str) -> tuple[str, ...]:
    """Drop blocks of images and sound, which text does not pass through."""
    inside = (block for block in blocks if not tower or block.startswith(f"{tower}."))
    return tuple(block for block in inside if not OTHER_TOWERS.search(block))


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
