"""Mixtures of experts with an MLP that every token passes: GLM-4.5, dots, ERNIE 4.5, AFMoE and their kin.

Not those with latent attention (see latent). Shared width, where not given = expert's width x shared experts.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import (
    ATTENTION,
    COHERE,
    FOUR_NORMS,
    HEAD_NORM,
    MLP_NO_BIAS,
    exaone_windows,
    mixers,
)
from weft.zoo.families.experts import ALL_MOE, SHARED, has_shared
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import RMS, Listed, Matrix, Several
from weft.zoo.patterns import (
    Names,
    always,
    layered,
    listed,
    moe_by_step,
    moe_from,
    sliding_except_every,
    sliding_from_layer,
)


def dense_first(count: int) -> Names:
    return lambda config: ["dense" if index < count else "moe" for index in range(config.layers)]


def ernie_feeds(config: Config) -> list[str]:
    start, step = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_interval", 1))
    end = int(config.get("moe_layer_end_index", -1))
    last = config.layers - 1 if end == -1 else end
    return ["moe" if (index + 1) % step == 0 and start <= index <= last else "dense" for index in range(config.layers)]


def cohere_moe_windows(config: Config) -> list[str]:
    prefix = int(config.get("first_k_dense_replace", 0))
    first, rest = (
        int(config.get("prefix_dense_sliding_window_pattern", 1)),
        int(config.get("sliding_window_pattern", 4)),
    )
    steps = [(index + 1) % first for index in range(prefix)] + [(i + 1) % rest for i in range(config.layers - prefix)]
    return ["sliding" if step else "full" for step in steps]


def mimo_windows(config: Config) -> list[str]:
    return ["full" if index == 0 or (index + 1) % 6 == 0 else "sliding" for index in range(config.layers)]


def beam_windows(config: Config) -> list[str]:
    names = ["sliding" if (index + 1) % 6 else "full" for index in range(config.layers)]
    return [*names[:-1], "full"]


def laguna_layers(config: Config) -> list[Layer]:
    """Each layer may have its own number of heads."""
    names, feeds = listed(always("full"))(config), listed(dense_first(1), key="mlp_layer_types")(config)
    heads = config.get("num_attention_heads_per_layer") or [config.heads] * config.layers
    return [
        Layer(name, feed, own=(("num_attention_heads", count),))
        for name, feed, count in zip(names, feeds, heads, strict=False)
    ]


def gate_heads(config: Config) -> int:
    given = config.get("gating", True)
    return config.heads if given is True or given == "per-head" else config.heads * config.head_dim


def m3_mixers(config: Config) -> list[str]:
    given = config.get("layer_types") or ["full_attention"] * config.layers
    return ["sparse" if name == "minimax_m3_sparse" else "full" for name in given]


def flint_mixers(config: Config) -> list[str]:
    last = config.layers - 1
    return ["full" if i < 2 or i % 4 == 1 or i == last else "sliding" for i in range(config.layers)]


def flint_feeds(config: Config) -> list[str]:
    return moe_by_step(config.given(mlp_only_layers=config.get("mlp_only_layers", [0, 1])))


SHARED_MOE = Moe(shared=SHARED, has_shared=has_shared)
GLM4_MOE = Family(
    mixers=mixers(Attention(out_bias=False, qk_norm="head", has_qk_norm="use_qk_norm")),
    feeds={"dense": MLP_NO_BIAS, "moe": SHARED_MOE},
    pattern=layered(always("full"), moe_from("first_k_dense_replace")),
)
M3_ATTENTION = Attention(bias=False, qk_norm="head")
M3_INDEXER = Listed(
    prefix="self_attn.indexer.",
    matrices=(
        Matrix(
            "q_proj", "hidden_size", lambda config: config.number("index_n_heads") * config.number("index_head_dim")
        ),
        Matrix("k_proj", "hidden_size", "index_head_dim"),
    ),
    norms=(("q_norm", "index_head_dim", RMS), ("k_norm", "index_head_dim", RMS)),
)

FAMILIES: dict[str, Family] = {
    "glm4_moe": GLM4_MOE,
    "solar_open": replace(GLM4_MOE, mixers=mixers(Attention(out_bias=False)), pattern=ALL_MOE),
    "dots1": replace(
        GLM4_MOE,
        mixers=mixers(HEAD_NORM),
        pattern=layered(
            listed(lambda config: sliding_from_layer(config.given(use_sliding_window=True))),
            moe_from("first_k_dense_replace"),
        ),
    ),
    "ernie4_5_moe": Family(
        mixers=mixers(Attention(bias="use_bias")),
        feeds={
            "dense": Mlp(bias="use_bias"),
            "moe": Moe(
                shared=replace(SHARED, bias="use_bias"),
                has_shared=has_shared,
                extras=(("gate.moe_statics.e_score_correction_bias", "num_experts"),),
            ),
        },
        pattern=layered(always("full"), ernie_feeds),
        head_bias="use_bias",
    ),
    "afmoe": Family(
        mixers=mixers(Attention(qk_norm="head", gate="gate_proj")),
        feeds={
            "dense": MLP_NO_BIAS,
            "moe": replace(SHARED_MOE, router="router.gate", extras=(("expert_bias", "num_experts"),)),
        },
        norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
        pattern=layered(
            listed(sliding_except_every(key="global_attn_every_n_layers", period=4)), moe_from("num_dense_layers")
        ),
        scaled_embedding="mup_enabled",
    ),
    "aria_text": Family(
        mixers=mixers(ATTENTION),
        feeds={
            "moe": Moe(
                router="router",
                width="intermediate_size",
                shared=replace(
                    SHARED,
                    bias="mlp_bias",
                    width=lambda config: config.number("intermediate_size") * config.number("num_shared_experts"),
                ),
            )
        },
        pattern=ALL_MOE,
    ),
    "cohere2_moe": replace(
        COHERE,
        mixers=mixers(ATTENTION),
        feeds={
            "dense": Mlp(bias=False, width="prefix_dense_intermediate_size"),
            "moe": Moe(
                width="intermediate_size",
                shared=replace(
                    SHARED,
                    width=lambda config: config.number("intermediate_size") * config.number("num_shared_experts"),
                ),
                has_shared=has_shared,
            ),
        },
        pattern=layered(listed(cohere_moe_windows), listed(moe_from("first_k_dense_replace"), key="mlp_layer_types")),
    ),
    "exaone_moe": Family(
        mixers=mixers(Attention(bias=False, qk_norm="head")),
        feeds={"dense": MLP_NO_BIAS, "moe": SHARED_MOE},
        pattern=layered(listed(exaone_windows), listed(moe_from("first_k_dense_replace"), key="mlp_layer_types")),
    ),
    "hunyuan_v1_moe": Family(
        mixers=mixers(Attention(qk_norm="head", norm_names=("query_layernorm", "key_layernorm"))),
        feeds={
            "moe": Moe(
                router="gate.wg",
                width="intermediate_size",
                shared=replace(SHARED, prefix="mlp.shared_mlp.", width="intermediate_size"),
            )
        },
        pattern=ALL_MOE,
    ),
    "hy_v3": Family(
        mixers=mixers(HEAD_NORM),
        feeds={"dense": Mlp(), "moe": replace(SHARED_MOE, shared=replace(SHARED, bias="mlp_bias"))},
        pattern=layered(always("full"), listed(dense_first(1), key="mlp_layer_types")),
    ),
    "kolibri1": Family(
        mixers=mixers(Attention(bias=False, qk_norm="head")),
        feeds={"moe": Moe(shared=replace(SHARED, width="shared_expert_intermediate_size"))},
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
        pattern=layered(listed(sliding_except_every(key="", period=5)), always("moe")),
    ),
    "laguna": Family(
        mixers=mixers(
            HEAD_NORM,
            Listed(matrices=(Matrix("self_attn.g_proj", "hidden_size", gate_heads, "column", role="attention"),)),
        ),
        feeds={
            "dense": MLP_NO_BIAS,
            "moe": Moe(
                shared=replace(SHARED, width="shared_expert_intermediate_size"),
                extras=(("gate.e_score_correction_bias", "num_experts"),),
            ),
        },
        pattern=laguna_layers,
    ),
    "mimo_v2_flash": Family(
        mixers={
            "full": (mimo := Attention(out_bias=False, value_dim="v_head_dim", materialises=True)),
            "sliding": replace(
                mimo,
                kv_heads=lambda config: 2 * config.kv_heads,
                sinks="sinks",
                window="sliding_window",
            ),
        },
        feeds={"dense": MLP_NO_BIAS, "moe": Moe()},
        pattern=layered(listed(mimo_windows), listed(dense_first(1), key="mlp_layer_types")),
    ),
    "beam": Family(
        mixers=mixers(
            Attention(qk_norm="head", gate="gate_proj"),
            Listed(extras=(("self_attn.gate_bias", "num_attention_heads"),)),
        ),
        feeds={"dense": MLP_NO_BIAS, "moe": Moe()},
        norms=FOUR_NORMS,
        pattern=layered(listed(beam_windows), listed(dense_first(3), key="mlp_layer_types")),
    ),
    "minimax_m3_vl_text": Family(
        mixers={"full": M3_ATTENTION, "sparse": Several(pieces=(M3_ATTENTION, M3_INDEXER))},
        feeds={
            "dense": Mlp(fused="gate_up_proj", bias=False, width="dense_intermediate_size"),
            "moe": Moe(
                width="intermediate_size",
                shared=replace(SHARED, fused="gate_up_proj", width="shared_intermediate_size"),
            ),
        },
        pattern=layered(m3_mixers, listed(always("moe"), key="mlp_layer_types")),
    ),
    "flint": Family(
        mixers=mixers(replace(HEAD_NORM, sinks="sinks", materialises=True)),
        feeds={
            "dense": MLP_NO_BIAS,
            "moe": Moe(shared=replace(SHARED, prefix="mlp.shared_expert.", width="shared_expert_intermediate_size")),
        },
        pattern=layered(listed(flint_mixers), flint_feeds),
    ),
}
