"""Dense decoders of the Llama kind: separate q, k, v, o; a gated MLP; norms before (or after) each half.

Not the GPT-2 kind (see gpt), not experts (see experts). Each entry says how a type differs from Llama.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.family import Family
from weft.zoo.feedforward import Mlp
from weft.zoo.parts import BARE_LAYER, LAYER, LAYER_NO_BIAS, Piece, Several
from weft.zoo.patterns import (
    always,
    full_every,
    layered,
    listed,
    sliding_except_every,
    sliding_from_layer,
    windowed,
)


def split_dim(config: Config) -> int:
    """The head dimension of code that does not read head_dim."""
    return config.hidden // config.heads


def exaone_windows(config: Config) -> list[str]:
    if config.get("sliding_window") is None:
        return ["full"] * config.layers
    return sliding_except_every(key="sliding_window_pattern", period=4)(config)


def smollm_windows(config: Config) -> list[str]:
    """The layers without rotary positions slide, where windows are switched on."""
    step = int(config.get("no_rope_layer_interval", 4))
    has_rope = config.get("no_rope_layers") or [(index + 1) % step for index in range(config.layers)]
    is_on = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    return ["sliding" if is_on and not rotary else "full" for rotary in has_rope[: config.layers]]


def mixers(attention: Attention, *beside: Piece) -> dict[str, Piece]:
    """The attention with and without a window, each with what else the mixer holds."""
    kinds = {
        "full": attention,
        "sliding": replace(attention, window="sliding_window"),
        "chunked": replace(attention, window="attention_chunk_size"),
    }
    return {name: Several(pieces=(kind, *beside)) if beside else kind for name, kind in kinds.items()}


ATTENTION = Attention()
NO_BIAS = Attention(bias=False)
QKV_BIAS = Attention(bias=True, out_bias=False)
HEAD_NORM = Attention(qk_norm="head")
MLP = Mlp()
MLP_NO_BIAS = Mlp(bias=False)
PLAIN_MLP = Mlp(gate="")
FUSED_MLP = Mlp(fused="gate_up_proj", bias=False)
FOUR_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
AFTER_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
LLAMA = Family(mixers=mixers(ATTENTION), feeds={"dense": MLP})
UNBIASED = replace(LLAMA, mixers=mixers(NO_BIAS), feeds={"dense": MLP_NO_BIAS})
MISTRAL = replace(UNBIASED, pattern=layered(windowed))
QWEN2 = replace(UNBIASED, mixers=mixers(QKV_BIAS), pattern=layered(listed(sliding_from_layer)))
QWEN3 = replace(QWEN2, mixers=mixers(HEAD_NORM))
GEMMA = replace(LLAMA, feeds={"dense": MLP_NO_BIAS}, scaled_embedding=True)
GEMMA2 = replace(
    GEMMA,
    mixers=mixers(Attention(materialises=True)),
    norms=FOUR_NORMS,
    pattern=layered(listed(sliding_except_every(key="", period=2))),
)
OLMO2 = replace(LLAMA, mixers=mixers(Attention(qk_norm="width")), feeds={"dense": MLP_NO_BIAS}, norms=AFTER_NORMS)
COHERE = replace(
    LLAMA,
    mixers=mixers(Attention(qk_norm="every_head", norm=LAYER_NO_BIAS, has_qk_norm="use_qk_norm")),
    feeds={"dense": MLP_NO_BIAS},
    norms=("input_layernorm",),
    norm=LAYER_NO_BIAS,
    is_parallel=True,
)

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA,
        mixers=mixers(HEAD_NORM),
        norms=FOUR_NORMS,
        pattern=layered(listed(sliding_except_every(key="sliding_window_pattern", period=6))),
    ),
    "olmo": replace(UNBIASED, mixers=mixers(ATTENTION), norm=BARE_LAYER),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, pattern=layered(listed(sliding_except_every(key="", period=4)))),
    "cohere": COHERE,
    "cohere2": replace(
        COHERE,
        mixers=mixers(Attention(head_dim=split_dim)),
        pattern=layered(listed(sliding_except_every(key="sliding_window_pattern", period=4))),
    ),
    "cohere_compass_text": replace(
        COHERE, mixers=mixers(Attention(head_dim=split_dim)), pattern=layered(listed(always("full")))
    ),
    "phi3": replace(
        UNBIASED,
        mixers=mixers(Attention(fused="qkv_proj", bias=False)),
        feeds={"dense": FUSED_MLP},
        pattern=layered(windowed),
        dropout="resid_pdrop",
    ),
    "glm": replace(LLAMA, mixers=mixers(Attention(out_bias=False)), feeds={"dense": FUSED_MLP}),
    "glm4": replace(
        LLAMA,
        mixers=mixers(Attention(out_bias=False)),
        feeds={"dense": FUSED_MLP},
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "starcoder2": replace(
        LLAMA,
        mixers=mixers(Attention(bias="use_bias")),
        feeds={"dense": Mlp(gate="", up="c_fc", down="c_proj", bias="use_bias")},
        norm=LAYER,
        pattern=layered(windowed),
        dropout="residual_dropout",
        embedding_dropout="embedding_dropout",
    ),
    "nemotron": replace(LLAMA, feeds={"dense": PLAIN_MLP}, norm=LAYER),
    "arcee": replace(LLAMA, feeds={"dense": PLAIN_MLP}),
    "cwm": replace(LLAMA, mixers=mixers(NO_BIAS), pattern=layered(listed(full_every(4)))),
    "ernie4_5": replace(
        LLAMA,
        mixers=mixers(Attention(bias="use_bias")),
        feeds={"dense": Mlp(bias="use_bias")},
    ),
    "exaone4": replace(
        UNBIASED,
        mixers=mixers(Attention(bias=False, qk_norm="head")),
        norms=AFTER_NORMS,
        pattern=layered(listed(exaone_windows)),
    ),
    "granite_swa": replace(
        LLAMA,
        mixers=mixers(Attention(sinks="sinks", materialises=True)),
        pattern=layered(listed(full_every(4))),
    ),
    "helium": replace(LLAMA, mixers=mixers(Attention(out_bias=False, o_rows="hidden_size"))),
    "jais2": replace(LLAMA, feeds={"dense": PLAIN_MLP}, norm=LAYER),
    "ministral": replace(MISTRAL, pattern=layered(listed(windowed))),
    "ministral3": MISTRAL,
    "seed_oss": replace(LLAMA, mixers=mixers(Attention(out_bias="attention_out_bias")), dropout="residual_dropout"),
    "smollm3": replace(LLAMA, pattern=layered(listed(smollm_windows))),
    "emu3_text_model": LLAMA,
}
