"""Causal LMs of the installed transformers on the meta device, and how a `ModelShape` differs from one of them.

Not a test: test_counts.py and benchmarks/zoo_counts.py both judge with `differences`. A shape is right when its total
is, when each layer has its block's count, and when each matrix, norm and extra has the name and size of a parameter.
"""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING

from weft.core.model_shape import BlockShape, ModelShape
from weft.models.hf_config import text_config
from weft.models.shape.derive import block_names

# sizes by the names configs give them: each draw is small, and most are odd enough to betray a mixed-up factor
_CHOICES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (320, 352), "max_position_embeddings": (64, 96), "n_positions": (64, 96), "max_seq_len": (64, 96),
    "intermediate_size": (96, 136), "ffn_dim": (96, 136), "n_inner": (96, None), "dim_ff": (96,), "dff": (96, 104),
    "decoder_ffn_dim": (96, 136), "moe_intermediate_size": (24, 40), "shared_expert_intermediate_size": (24, 56),
    "expert_ffn_hidden_size": (24,), "shared_intermediate_size": (0, 40), "intermediate_size_mlp": (72, 104),
    "dense_intermediate_size": (72,), "ffn_hidden_size": (96,), "moe_shared_expert_intermediate_size": (40,),
    "num_hidden_layers": (3, 4, 6), "n_layer": (3, 4), "n_layers": (3, 4), "num_layers": (3, 4),
    "decoder_layers": (3, 4),
    "num_experts": (4, 6), "num_local_experts": (4, 6), "n_routed_experts": (4, 8), "moe_num_experts": (4, 6),
    "num_experts_per_tok": (1, 2), "num_experts_per_token": (1, 2), "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2), "moe_num_shared_experts": (1, 2),
    "n_group": (1,), "topk_group": (1,), "first_k_dense_replace": (0, 1, 2), "num_dense_layers": (1, 2),
    "q_lora_rank": (24, None), "kv_lora_rank": (16, 40), "qk_rope_head_dim": (8, 16), "qk_nope_head_dim": (8, 24),
    "v_head_dim": (16, 32), "decoder_sparse_step": (1, 2), "sliding_window": (32,), "moe_layer_start_index": (0, 1),
    "interleave_moe_layer_step": (1, 2), "type_vocab_size": (2, 3), "word_embed_proj_dim": (32, 64),
    "mamba_d_state": (16, 24), "state_size": (16, 24), "mamba_d_conv": (3, 4), "mamba_expand": (2,),
    "conv_kernel": (3, 4),
    "vocab_size_per_layer_input": (320,), "index_n_heads": (2, 4), "index_head_dim": (16,),
}  # fmt: skip
# what a type asks for beyond sizes
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma3n_text": {"num_hidden_layers": 7, "num_kv_shared_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_attention_heads": 4, "hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "zamba": {"num_hidden_layers": 12, "attn_layer_period": 3, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "zamba2": {"num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"]},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 24},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "xmod": {"default_language": "en_XX"},
}
_FLAGS = re.compile(
    r"bias|tie_word|qk_(layer)?norm|use_post_norm|multi_query|parallel|new_decoder|do_layer_norm_before"
)
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


class RefusedError(Exception):
    """transformers does not build this config: sizes drawn at random do not always go together."""


def draw(model_type: str, rng: random.Random, *, flags: bool = True) -> dict[str, Any]:
    """Small sizes for a type, drawn at random: heads and key-value heads that divide, flags either way."""
    try:
        config = CONFIG_MAPPING[model_type]()
        text = text_config(config)
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
    if text is not config:
        key = next(key for key, value in vars(config).items() if value is text)
        return {key: {"model_type": text.model_type, **draw(text.model_type, rng, flags=flags)}}
    defaults = config.to_dict()
    heads, dim = rng.choice(((4, 16), (8, 8), (6, 16)))
    drawn: dict[str, Any] = {key: heads for key in _HEADS if key in defaults}
    drawn |= {key: heads * dim for key in _HIDDEN if key in defaults}
    drawn |= {key: rng.choice((heads, heads // 2)) for key in _KV_HEADS if key in defaults}
    if "head_dim" in defaults:
        drawn["head_dim"] = rng.choice((dim, 2 * dim))
    drawn |= {key: rng.choice(options) for key, options in _CHOICES.items() if key in defaults and key not in drawn}
    for key, value in defaults.items():
        if flags and isinstance(value, bool) and _FLAGS.search(key) and key not in drawn:
            drawn[key] = rng.random() < 0.5
    return drawn | _SPECIAL.get(model_type, {})


def build(model_type: str, overrides: dict[str, Any]) -> nn.Module:
    """The model as `AutoModelForCausalLM` makes it, without memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _on_meta(model_type, overrides)
        except Exception as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error


def _on_meta(model_type: str, overrides: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0) if overrides else {}
    nested = {key: value | tokens for key, value in overrides.items() if key == "text_config"}
    config = CONFIG_MAPPING[model_type](**overrides | nested, **tokens)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # type: ignore[operator]
    return model


def differences(model: nn.Module, shape: ModelShape) -> list[str]:
    """What is wrong with the shape, worst first; nothing when it is exact."""
    total = sum(parameter.numel() for parameter in model.parameters())
    found = [f"total {shape.num_parameters - total:+,} of {total:,}"] if shape.num_parameters != total else []
    for index, layer in enumerate(layers_of(model)):
        wrong = _layer_differences(layer, shape.kinds[shape.order[index]])
        if wrong:
            return [*found, *(f"layer {index}: {line}" for line in wrong)]
    return found


def layers_of(model: nn.Module) -> list[dict[str, int]]:
    """Parameters by name of each block, each shared tensor once."""
    names = block_names(model)
    layers: dict[str, dict[str, int]] = {name: {} for name in names}
    for name, parameter in model.named_parameters():
        owner = next((block for block in names if name.startswith(f"{block}.")), None)
        if owner is not None:
            layers[owner][name.removeprefix(f"{owner}.")] = parameter.numel()
    return list(layers.values())


def _layer_differences(layer: dict[str, int], block: BlockShape) -> list[str]:
    found = []
    if block.num_parameters != sum(layer.values()):
        found.append(f"{block.kind} has {block.num_parameters - sum(layer.values()):+,} parameters")
    rest = dict(layer)
    for part in (*block.extras, *block.norms, *block.linears):
        size = sum(rest.pop(name) for name in [name for name in rest if _is_of(name, part.name)])
        if size != part.num_parameters:
            found.append(f"{part.name} is {part.num_parameters:,}, not {size:,}")
    return found + [f"{name} ({size:,}) is missing" for name, size in rest.items() if size]


def _is_of(name: str, part: str) -> bool:
    """Whether a parameter belongs to a declared part; * in the part's name stands for a number, ** for anything."""
    pattern = re.escape(part).replace(r"\*\*", ".*").replace(r"\*", r"\d+")
    return re.fullmatch(rf"{pattern}((\.|^)\w+|_bias)?", name) is not None
