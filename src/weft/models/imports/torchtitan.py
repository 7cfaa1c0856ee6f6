"""Names of torchtitan's Llama. Its rotary embedding pairs neighbouring rows of a head, Hugging Face's the halves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from weft.core.errors import ModelError
from weft.models.imports.recipes import Make, ModelFacts, Recipe, Recipes

FAMILIES = ("llama",)
_OUTSIDE = {"embed_tokens": "tok_embeddings", "norm": "norm", "lm_head": "output"}
_IN_LAYERS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def is_torchtitan(names: Iterable[str]) -> bool:
    return any(name.removeprefix("model.") == "tok_embeddings.weight" for name in names)


def torchtitan_recipes(wanted: Iterable[str], shapes: Mapping[str, object], facts: ModelFacts) -> Recipes:
    """A recipe for every wanted name; the caller checks that its keys exist."""
    if facts.model_type not in FAMILIES:
        raise ModelError(
            f"a torchtitan checkpoint of a {facts.model_type} is not imported: only of {', '.join(FAMILIES)}",
            hint="torchtitan's other models differ between its versions in the order of rotary dimensions, which a "
            "checkpoint does not record; save it there with last_save_in_hf",
        )
    prefix = "model." if "model.tok_embeddings.weight" in shapes else ""
    return {name: _recipe(name, prefix, facts) for name in wanted}


def _recipe(name: str, prefix: str, facts: ModelFacts) -> Recipe:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    if found is None:
        return Recipe((f"{prefix}{_OUTSIDE.get(stem, stem)}.{kind}",))
    layer, part = found.groups()
    key = f"{prefix}layers.{layer}.{_IN_LAYERS.get(part, part)}.{kind}"
    heads = {"self_attn.q_proj": facts.num_heads, "self_attn.k_proj": facts.num_kv_heads}.get(part)
    return Recipe((key,), _halves(heads)) if heads else Recipe((key,))


def _halves(heads: int) -> Make:
    """Rows 0, 1, 2, 3, ... of each head as 0, 2, ..., 1, 3, ...."""

    def reorder(value: torch.Tensor) -> torch.Tensor:
        by_pair = value.reshape(heads, -1, 2, *value.shape[1:])
        return by_pair.transpose(1, 2).reshape(value.shape)

    return reorder
