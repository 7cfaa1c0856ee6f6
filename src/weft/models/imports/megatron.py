"""Names of Megatron-Core's GPT in `torch_dist` checkpoints: layers stacked in the first dimension, or numbered.

linear_qkv   per group of queries: its query heads, its key head, its value head
linear_fc1   gate rows, then up rows (or two tensors, ..._w and ..._v)
vocabulary   padded rows at the end
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from weft.core.errors import ModelError
from weft.models.imports.recipes import Make, ModelFacts, Recipe, Recipes, trimmed

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_EMBEDDING = "embedding.word_embeddings.weight"
_PREFIXES = ("", "model.", "module.", "model.module.")
# alternatives: Transformer Engine fuses norms into the linear after them
_IN_LAYERS = {
    "self_attn.o_proj": ("self_attention.linear_proj.{}",),
    "self_attn.q_norm": ("self_attention.q_layernorm.{}",),
    "self_attn.k_norm": ("self_attention.k_layernorm.{}",),
    "mlp.down_proj": ("mlp.linear_fc2.{}",),
    "input_layernorm": ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}"),
}
_QKV = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}
_GATE_UP = {"mlp.gate_proj": 0, "mlp.up_proj": 1}


def is_megatron(names: Iterable[str]) -> bool:
    given = set(names)
    return any(prefix + _EMBEDDING in given for prefix in _PREFIXES)


def megatron_recipes(wanted: Iterable[str], shapes: Mapping[str, object], facts: ModelFacts) -> Recipes:
    """A recipe for every wanted name; the caller checks that its keys exist."""
    if facts.model_type not in FAMILIES:
        raise ModelError(
            f"a Megatron checkpoint of a {facts.model_type} is not imported: only of {', '.join(FAMILIES)}",
            hint="names and layouts of other families are not known here; convert it with Megatron-Bridge",
        )
    prefix = next(each for each in _PREFIXES if each + _EMBEDDING in shapes)
    return {name: _recipe(name, prefix, shapes, facts) for name in wanted}


def _recipe(name: str, prefix: str, shapes: Mapping[str, object], facts: ModelFacts) -> Recipe:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    outside = {"embed_tokens": _EMBEDDING, "lm_head": "output_layer.weight", "norm": f"decoder.final_layernorm.{kind}"}
    if stem in outside:
        make = trimmed(facts.vocab_size) if stem != "norm" else Recipe(()).make
        return Recipe((prefix + outside[stem],), make)
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    if found is None:
        return Recipe((prefix + name,))
    layer, part = int(found.group(1)), found.group(2)
    if part in _QKV:
        return _in_layer(prefix, shapes, layer, f"self_attention.linear_qkv.{kind}", _qkv_rows(facts, _QKV[part]))
    if part in _GATE_UP:
        return _gate_up(prefix, shapes, layer, kind, _GATE_UP[part])
    places = [place.format(kind) for place in _IN_LAYERS.get(part, (f"{part}.{{}}",))]
    recipes = [_in_layer(prefix, shapes, layer, place, Recipe(()).make) for place in places]
    return next((recipe for recipe in recipes if recipe.keys[0] in shapes), recipes[0])


def _in_layer(prefix: str, shapes: Mapping[str, object], layer: int, place: str, make: Make) -> Recipe:
    """A tensor of one layer, with a number in its name or as an index of the stacked one."""
    stacked = f"{prefix}decoder.layers.{place}"
    if stacked in shapes:
        return Recipe((stacked,), lambda value: make(value[layer]))
    return Recipe((f"{prefix}decoder.layers.{layer}.{place}",), make)


def _gate_up(prefix: str, shapes: Mapping[str, object], layer: int, kind: str, which: int) -> Recipe:
    separate = _in_layer(prefix, shapes, layer, f"mlp.linear_fc1.{kind}_{'wv'[which]}", Recipe(()).make)
    if separate.keys[0] in shapes:
        return separate
    return _in_layer(prefix, shapes, layer, f"mlp.linear_fc1.{kind}", lambda value: value.chunk(2)[which])


def _qkv_rows(facts: ModelFacts, which: int) -> Make:
    per_group = facts.num_heads // facts.num_kv_heads
    sizes = [per_group * facts.head_dim, facts.head_dim, facts.head_dim]

    def rows(value: torch.Tensor) -> torch.Tensor:
        by_group = value.reshape(facts.num_kv_heads, sum(sizes), *value.shape[1:])
        return torch.split(by_group, sizes, dim=1)[which].flatten(0, 1)

    return rows
