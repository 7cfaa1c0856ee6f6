"""Latent attention taken further: DeepSeek V4 (windows made one, hyper-connections) and AXK2 (gated queries and norms).

Not DeepSeek V2 and V3 (see latent).
"""

from __future__ import annotations

from weft.zoo.attention import Attention, Latent
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import MLP_NO_BIAS
from weft.zoo.families.experts import SHARED
from weft.zoo.families.latent import INDEXER, after_dense
from weft.zoo.families.shared_experts import SHARED_MOE
from weft.zoo.family import Family, Layer
from weft.zoo.parts import RMS, Listed, Matrix, Several
from weft.zoo.patterns import (
    always,
    layered,
    listed,
)


def q_width(config: Config) -> int:
    return config.heads * config.head_dim


def v4_layers(config: Config) -> list[Layer]:
    names = {SPARSE: "sparse", HEAVY: "heavy", "sliding_attention": "sliding"}
    ratios = {0: "sliding", 4: "sparse", 128: "heavy"}
    if config.get("layer_types") is not None:
        kinds = [names[str(name)] for name in config.get("layer_types")]
    elif config.get("compress_ratios") is not None:
        kinds = [ratios[ratio] for ratio in config.get("compress_ratios")]
    else:
        kinds = ["heavy"] * 2 + ["sparse" if index % 2 else "heavy" for index in range(max(config.layers - 2, 0))]
    return [Layer(kind, "moe") for kind in kinds[: config.layers]]


def compressor(prefix: str, *, rate: int, key: str, wide: int, width: str) -> Listed:
    """Keys and values of a window of `rate` tokens become one."""

    def size(config: Config) -> int:
        return wide * (config.head_dim if width == "head_dim" else config.number(width))

    def rows(config: Config) -> int:
        return int((config.get("compress_rates") or {}).get(key, rate))

    return Listed(
        prefix=prefix,
        matrices=(
            Matrix("kv_proj", "hidden_size", size, role="attention"),
            Matrix("gate_proj", "hidden_size", size, role="attention"),
        ),
        norms=(("kv_norm", lambda config: size(config) // wide, RMS),),
        extras=(("position_bias", lambda config: rows(config) * size(config)),),
    )


def v4_hyper(config: Config) -> int:
    count = config.number("hc_mult")
    return (2 + count) * count


def gated_norm(name: str) -> Listed:
    return Listed(
        prefix=f"{name}.",
        matrices=(
            Matrix("mlp.fc1", "hidden_size", "gated_norm_rank"),
            Matrix("mlp.fc2", "gated_norm_rank", "hidden_size"),
        ),
        norms=(("norm", "hidden_size", RMS),),
    )


SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
V4_ATTENTION = Listed(
    prefix="self_attn.",
    matrices=(
        Matrix("q_a_proj", "hidden_size", "q_lora_rank", role="attention"),
        Matrix("q_b_proj", "q_lora_rank", q_width, "column", role="attention"),
        Matrix("kv_proj", "hidden_size", lambda config: config.head_dim, role="attention"),
        Matrix(
            "o_a_proj", lambda config: q_width(config) // config.number("o_groups"),
            lambda config: config.number("o_groups") * config.number("o_lora_rank"), "column", role="attention",
        ),
        Matrix(
            "o_b_proj", lambda config: config.number("o_groups") * config.number("o_lora_rank"), "hidden_size", "row",
            role="attention",
        ),
    ),
    norms=(("q_a_norm", "q_lora_rank", RMS), ("kv_norm", lambda config: config.head_dim, RMS)),
    extras=(("sinks", "num_attention_heads"),),
    attention=Attention(kv_heads=1, materialises=True, window="sliding_window"),
)  # fmt: skip
V4_INDEXER = Listed(
    prefix="self_attn.compressor.indexer.",
    matrices=(
        Matrix(
            "q_b_proj", "q_lora_rank", lambda config: config.number("index_n_heads") * config.number("index_head_dim"),
            role="attention",
        ),
        Matrix("scorer.weights_proj", "hidden_size", "index_n_heads", role="attention"),
    ),
)  # fmt: skip
DEEPSEEK_V4 = Family(
    mixers={
        "sliding": V4_ATTENTION,
        "heavy": Several(
            pieces=(
                V4_ATTENTION, compressor("self_attn.compressor.", rate=128, key=HEAVY, wide=1, width="head_dim"),
            )
        ),
        "sparse": Several(
            pieces=(
                V4_ATTENTION,
                compressor("self_attn.compressor.", rate=4, key=SPARSE, wide=2, width="head_dim"),
                compressor("self_attn.compressor.indexer.", rate=4, key=SPARSE, wide=2, width="index_head_dim"),
                V4_INDEXER,
            )
        ),
    },
    feeds={"moe": replace(SHARED_MOE, shared=replace(SHARED, bias="mlp_bias", width="moe_intermediate_size"))},
    pattern=v4_layers,
    extras=tuple(
        (f"{half}_hc.{name}", size)
        for half in ("attn", "ffn")
        for name, size in (
            ("fn", lambda config: v4_hyper(config) * config.number("hc_mult") * config.hidden),
            ("base", v4_hyper),
            ("scale", 3),
        )
    ),
    outside=(
        ("hc_head.hc_fn", lambda config: config.number("hc_mult") ** 2 * config.hidden),
        ("hc_head.hc_base", "hc_mult"),
        ("hc_head.hc_scale", 1),
    ),
)  # fmt: skip
AXK2_ATTENTION = Listed(
    prefix="self_attn.",
    matrices=(
        Matrix("q_a_proj", "hidden_size", "q_lora_rank", bias="attention_bias", role="attention"),
        Matrix(
            "q_gate_proj", lambda config: 2 * config.number("q_lora_rank"),
            lambda config: config.heads * (
                config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim") + config.number("v_head_dim")
            ),
            "column", role="attention",
        ),
        Matrix(
            "kv_a_proj_with_mqa", "hidden_size",
            lambda config: config.number("kv_lora_rank") + config.number("qk_rope_head_dim"),
            bias="attention_bias", role="attention",
        ),
        Matrix(
            "kv_b_proj", "kv_lora_rank",
            lambda config: config.heads * (config.number("qk_nope_head_dim") + config.number("v_head_dim")),
            "column", role="attention",
        ),
        Matrix(
            "o_proj", lambda config: config.heads * config.number("v_head_dim"), "hidden_size", "row", "attention_bias",
            "attention",
        ),
    ),
    norms=(("q_a_layernorm", "q_lora_rank", RMS), ("kv_a_layernorm", "kv_lora_rank", RMS)),
    attention=Latent(),
)  # fmt: skip
AXK2 = Family(
    mixers={"full": Several(pieces=(AXK2_ATTENTION, INDEXER, gated_norm("input_layernorm")))},
    feeds={
        "dense": MLP_NO_BIAS,
        "moe": Several(pieces=(SHARED_MOE, gated_norm("post_attention_layernorm"))),
    },
    pattern=layered(always("full"), listed(after_dense, key="mlp_layer_types")),
    own_norms={"moe": (), "dense": ("post_attention_layernorm",)},
)

FAMILIES: dict[str, Family] = {
    "deepseek_v4": DEEPSEEK_V4,
    "axk2": AXK2,
}
