"""Features that a layout rules out, with reasons: sequence parallelism, grids of ranks, a vocabulary-parallel loss.

    sequence_parallel   blocks in one list, whose other arguments do not depend on the sequence shard
    grid                blocks of norms and of linear layers in regions: features are sharded too
    loss_parallel       a sharded head

Anything that is not known to be harmless is refused.
"""

from __future__ import annotations

import inspect

from torch import nn

from weft.models.layout import ModelLayout
from weft.models.tp.layout import TensorLayout
from weft.models.tp.reasons import OUTSIDE, sharded_parameters
from weft.models.tp.roles import linear_facts, takes
from weft.models.tp.vocabulary import Ends
from weft.zoo.tensor_exceptions import NOT_STRAIGHT

# arguments of a block that do not depend on the rank's sequence shard: attention sees the full sequence
_HARMLESS = {
    "self", "hidden_states", "x", "activations", "attention_mask", "position_ids", "past_key_values", "layer_past",
    "cache_params", "use_cache", "output_attentions", "position_embeddings", "kwargs", "alibi", "position_bias",
    "encoder_hidden_states", "encoder_attention_mask", "attention_scaling", "mamba_attention_mask", "sinusoidal_pos",
    "codebook_idx", "self_attn_prompt", "cross_attn_prompt",
}  # fmt: skip


def refusals_of(
    model: nn.Module, layout: ModelLayout, found: TensorLayout, *, model_type: str, ends: Ends
) -> dict[str, str]:
    """Feature that this layout rules out -> why."""
    reasons = {
        "sequence_parallel": NOT_STRAIGHT.get(model_type)
        or _not_straight(model, layout, found)
        or _sorted_experts(model, found)
        or _unexplained(model, layout, found),
        "grid": _no_grid(model, layout, found),
        "loss_parallel": _replicated_head(ends),
    }
    return {what: why for what, why in reasons.items() if why is not None}


def _not_straight(model: nn.Module, layout: ModelLayout, found: TensorLayout) -> str | None:
    """The reason why the blocks are not one chain of hidden states, or None."""
    if not layout.blocks:
        return "the model has no repeated blocks"
    if any(found.replicated.get(name) == OUTSIDE for name in layout.unit_of if layout.unit_of[name] in layout.blocks):
        return "text does not pass all of its blocks"
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    if len(lists) > 1:
        return f"its blocks are in {len(lists)} lists, which are not one chain"
    for block in {type(model.get_submodule(name)) for name in layout.blocks}:
        others = set(inspect.signature(inspect.unwrap(block.forward)).parameters) - _HARMLESS
        if others:
            return f"its blocks also take {min(others)}"
    return None


def _sorted_experts(model: nn.Module, found: TensorLayout) -> str | None:
    """Refuse experts that get tokens sorted by expert: sequence shards of those cannot be gathered."""
    experts = (region.name for region in found.regions if region.kind == "experts")
    name = next((name for name in experts if not takes(model.get_submodule(name), "top_k_index")), None)
    return None if name is None else f"{name} does not take top_k_index with its tokens"


def _unexplained(model: nn.Module, layout: ModelLayout, found: TensorLayout) -> str | None:
    """A parameter of a block that is in no region, mixer, norm, linear layer or router."""
    known = {name for region in found.regions for name in (*region.partial, *(one.name for one in region.tensors))}
    for name, reason in found.replicated.items():
        if name in known or layout.unit_of[name] not in layout.blocks or "does not shard" in reason:
            continue
        if reason in ("a norm", "the router") or any(name.startswith(f"{one}.") for one in found.mixers):
            continue
        if linear_facts("", model.get_submodule(name.rpartition(".")[0])) is None:
            return f"the effect of {name} on tokens is unknown"
    return None


def _replicated_head(ends: Ends) -> str | None:
    if ends.head is not None:
        return None
    return f"the head is replicated: {next(reversed(ends.reasons.values()), 'the model names none')}"


def _no_grid(model: nn.Module, layout: ModelLayout, found: TensorLayout) -> str | None:
    if not found.regions:
        return "no part of the model is sharded"
    if found.mixers:
        return f"{found.mixers[0]} is replicated"
    if any(region.kind == "experts" for region in found.regions):
        return "experts are not sharded on grids"
    known = _understood(model, found)
    beside = (name for name, unit in layout.unit_of.items() if unit in layout.blocks and name not in known)
    name = next(beside, None)
    return None if name is None else f"{name} is neither in a region nor in a norm"


def _understood(model: nn.Module, found: TensorLayout) -> set[str]:
    """Parameters that a grid places: sharded ones, biases of rows, norms of the residual stream and of single heads."""
    names = set(sharded_parameters(found, model))
    linears = {linear.name for region in found.regions for linear in region.linears}
    norms = {*found.norms, *(name.rpartition(".")[0] for region in found.regions for name in region.partial)}
    latent = {name for name in norms if isinstance(model.get_submodule(name), nn.Linear)}
    homes = linears | (norms - latent)
    return names | {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in homes}
