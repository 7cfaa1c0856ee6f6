"""Multi-head latent attention: DeepSeek and its kin, dense or with experts, with or without a sparse indexer.

Not grouped attention. The first `first_k_dense_replace` layers have a dense MLP, the rest experts beside shared ones.
"""

from __future__ import annotations

from weft.zoo.attention import Latent
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.experts import SHARED
from weft.zoo.families.shared_experts import SHARED_MOE, dense_first
from weft.zoo.family import Family, Layer, Pattern
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import LAYER, RMS, Listed, Matrix, Several
from weft.zoo.patterns import (
    Names,
    always,
    layered,
    listed,
    moe_from,
)


def after_dense(config: Config) -> list[str]:
    first, step = int(config.get("first_k_dense_replace", 1)), int(config.get("moe_layer_freq", 1))
    return ["moe" if index >= first and index % step == 0 else "dense" for index in range(config.layers)]


def indexed_layers(indexers: Names, feeds: Names) -> Pattern:
    """Layers whose indexer is shared with an earlier layer have none of their own."""

    def pattern(config: Config) -> list[Layer]:
        names = ["full" if name == "full" else "reusing" for name in listed(indexers, key="indexer_types")(config)]
        return [
            Layer(name, feed) for name, feed in zip(names, listed(feeds, key="mlp_layer_types")(config), strict=True)
        ]

    return pattern


def dsa_indexers(config: Config) -> list[str]:
    every, offset = max(int(config.get("index_topk_freq", 1)), 1), int(config.get("index_skip_topk_offset", 2))
    return ["full" if max(index - offset + 1, 0) % every == 0 else "shared" for index in range(config.layers)]


def hy_indexers(config: Config) -> list[str]:
    return ["full" if index == 0 or (index - 1) % 4 == 0 else "shared" for index in range(config.layers)]


def index_width(config: Config) -> int:
    return config.number("index_n_heads") * config.number("index_head_dim")


def streams(config: Config) -> int:
    return config.number("hc_mult") * config.hidden


INDEXER = Listed(
    prefix="self_attn.indexer.",
    matrices=(
        Matrix("wq_b", "q_lora_rank", index_width, role="attention"),
        Matrix("wk", "hidden_size", "index_head_dim", role="attention"),
        Matrix("weights_proj", "hidden_size", "index_n_heads", role="attention"),
    ),
    norms=(("k_norm", "index_head_dim", LAYER),),
)
DENSE_MLP = Mlp(bias=False)
DEEPSEEK = Family(
    mixers={"full": Latent()},
    feeds={"dense": DENSE_MLP, "moe": replace(SHARED_MOE, count="n_routed_experts", has_shared=True)},
    pattern=layered(always("full"), moe_from("first_k_dense_replace")),
)
INDEXED = replace(
    DEEPSEEK,
    mixers={"full": Several(pieces=(Latent(), INDEXER)), "reusing": Latent()},
    pattern=layered(listed(always("full")), listed(moe_from("first_k_dense_replace"), key="mlp_layer_types")),
)
HYPER = tuple(  # hyper-connections: the residual is several streams, mixed before and after each half
    (f"{half}_hc.{name}", size)
    for half in ("attn", "ffn")
    for name, size in (
        ("fn", lambda config: 2 * config.number("hc_mult") * streams(config)),
        ("base", lambda config: 2 * config.number("hc_mult")),
        ("scale", 2),
    )
)


def with_zero_experts(config: Config) -> int:
    """Experts that return their input are routed to and, but for one tensor, have no weights."""
    return config.number("n_routed_experts") + config.number("zero_expert_num")


LONGCAT_MOE = Listed(
    prefix="mlp.",
    matrices=(
        Matrix("experts.gate_up_proj", "hidden_size", lambda config: 2 * config.number("expert_ffn_hidden_size"),
               "column", role="expert", copies=with_zero_experts, active="moe_topk"),
        Matrix("experts.down_proj", "expert_ffn_hidden_size", "hidden_size", "row", role="expert",
               copies="n_routed_experts", active="moe_topk"),
        Matrix("router.classifier", "hidden_size", with_zero_experts, bias="router_bias", role="router"),
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": replace(
        DEEPSEEK,
        feeds={
            "dense": Mlp(),
            "moe": Moe(count="n_routed_experts", shared=replace(SHARED, bias="mlp_bias")),
        },
    ),
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": replace(INDEXED, pattern=indexed_layers(dsa_indexers, moe_from("first_k_dense_replace"))),
    "glm4_moe_lite": replace(DEEPSEEK, pattern=layered(always("full"), listed(dense_first(1), key="mlp_layer_types"))),
    "youtu": replace(DEEPSEEK, feeds={"dense": Mlp()}, pattern=layered(always("full"))),
    "minicpm3": replace(
        DEEPSEEK,
        mixers={"full": Latent(value_dim=lambda config: int(config.get("v_head_dim", config.hidden // config.heads)))},
        feeds={"dense": Mlp()},
        pattern=layered(always("full")),
        scaled_embedding=True,
    ),
    "axk1": replace(
        DEEPSEEK,
        feeds={
            "dense": DENSE_MLP,
            "moe": Several(
                pieces=(
                    replace(SHARED_MOE, count="n_routed_experts"),
                    Listed(norms=(("mlp.post_mlp_layernorm", "hidden_size", RMS),)),
                )
            ),
        },
        pattern=layered(always("full"), listed(after_dense, key="mlp_layer_types")),
    ),
    "hy_v4": replace(
        INDEXED,
        mixers={
            "full": Several(pieces=(hy := Latent(gate="gate_proj", sinks="sinks", materialises=True), INDEXER)),
            "reusing": hy,
        },
        pattern=indexed_layers(hy_indexers, dense_first(1)),
        extras=HYPER,
        outside=(
            ("hc_head.hc_fn", lambda config: config.number("hc_mult") * streams(config)),
            ("hc_head.hc_base", "hc_mult"),
            ("hc_head.hc_scale", 1),
        ),
    ),
    "longcat_flash": Family(
        mixers={"full": Several(pieces=tuple(Latent(prefix=f"self_attn.{index}.") for index in (0, 1)))},
        feeds={
            "moe": Several(
                pieces=(
                    *(Mlp(prefix=f"mlps.{index}.", bias=False, width="ffn_hidden_size") for index in (0, 1)),
                    Moe(
                        router="",
                        is_listed=True,
                        count="n_routed_experts",
                        top_k="moe_topk",
                        width="expert_ffn_hidden_size",
                    ),
                    LONGCAT_MOE,
                )
            )
        },
        norms=(
            "input_layernorm.0",
            "input_layernorm.1",
            "post_attention_layernorm.0",
            "post_attention_layernorm.1",
        ),
        pattern=lambda config: [Layer("full", "moe")] * config.count("num_layers"),
    ),
}
