"""Mixtures of experts around grouped attention: Mixtral, Qwen-MoE, gpt-oss and their kin.

Not those that began with shared experts (see shared_experts) nor with latent attention (see latent).
The experts' matrices are fused: gate and up in one tensor of all experts.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import AFTER_NORMS, ATTENTION, HEAD_NORM, MLP_NO_BIAS, NO_BIAS, mixers
from weft.zoo.family import Family
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import BARE_RMS, LAYER, RMS, Listed, Matrix, Several
from weft.zoo.patterns import (
    always,
    full_every,
    layered,
    listed,
    moe_by_step,
    moe_listed,
    sliding_except_every,
    windowed,
)


def shared_width(config: Config) -> int:
    """Shared experts are one MLP as wide as all of them."""
    return config.number("moe_intermediate_size") * int(config.get("num_shared_experts", 0))


def has_shared(config: Config) -> bool:
    return int(config.get("num_shared_experts", 0)) > 0


def qwen2_moe_windows(config: Config) -> list[str]:
    end = int(config.get("max_window_layers", 0)) if config.flag("use_sliding_window") else 0
    return ["sliding" if index % 2 == 0 and index < end else "full" for index in range(config.layers)]


def windowed_if_used(config: Config) -> list[str]:
    return windowed(config) if config.flag("use_sliding_window") else ["full"] * config.layers


def llama4_windows(config: Config) -> list[str]:
    """Layers with rotary positions attend in chunks."""
    step = int(config.get("no_rope_layer_interval", 4))
    rotary = config.get("no_rope_layers") or [(index + 1) % step for index in range(config.layers)]
    return ["chunked" if has_rope else "full" for has_rope in rotary[: config.layers]]


def llama4_feeds(config: Config) -> list[str]:
    step = int(config.get("interleave_moe_layer_step", 1))
    return ["moe" if step and (index + 1) % step == 0 else "dense" for index in range(config.layers)]


def lightning(config: Config) -> int:
    return config.heads * config.head_dim


def jet_width(config: Config) -> int:
    return config.number("kv_channels") * config.kv_heads


SHARED = Mlp(prefix="mlp.shared_experts.", bias=False, role="shared_expert", width=shared_width)
ALL_MOE = layered(always("full"), always("moe"))
MIXTRAL = Family(
    mixers=mixers(NO_BIAS),
    feeds={"moe": Moe(width="intermediate_size")},
    pattern=layered(windowed, always("moe")),
)
QWEN2_MOE = Family(
    mixers=mixers(Attention(bias="qkv_bias", out_bias=False)),
    feeds={
        "dense": MLP_NO_BIAS,
        "moe": Moe(
            shared=replace(SHARED, prefix="mlp.shared_expert.", width="shared_expert_intermediate_size"),
            shared_gate="shared_expert_gate",
        ),
    },
    pattern=layered(listed(qwen2_moe_windows), moe_by_step),
)
QWEN3_MOE = replace(
    QWEN2_MOE,
    mixers=mixers(HEAD_NORM),
    feeds={"dense": MLP_NO_BIAS, "moe": Moe()},
    pattern=layered(windowed_if_used, moe_by_step),
)
GRANITE_MOE = Family(
    mixers=mixers(ATTENTION),
    feeds={"moe": Moe(prefix="block_sparse_moe.", router="router", width="intermediate_size")},
    pattern=ALL_MOE,
)
GRANITE_SHARED = Mlp(
    prefix="shared_mlp.", fused="input_linear", down="output_linear", bias=False, width="shared_intermediate_size",
    role="shared_expert",
)  # fmt: skip
GRANITE_SHARED_MOE = Moe(
    prefix="block_sparse_moe.", router="router", width="intermediate_size", shared=GRANITE_SHARED,
    has_shared="shared_intermediate_size",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": Family(
        mixers=mixers(Attention(sinks="sinks", materialises=True)),
        feeds={"moe": Moe(router="router", router_bias=True, width="intermediate_size", expert_bias=True)},
        pattern=layered(listed(sliding_except_every(key="", period=2)), always("moe")),
    ),
    "olmoe": replace(MIXTRAL, mixers=mixers(Attention(qk_norm="width")), pattern=ALL_MOE),
    "flex_olmo": replace(MIXTRAL, mixers=mixers(Attention(qk_norm="width")), pattern=ALL_MOE, norms=AFTER_NORMS),
    "phimoe": replace(
        MIXTRAL,
        mixers=mixers(ATTENTION),
        feeds={"moe": Moe(router="router", width="intermediate_size")},
        norm=LAYER,
        head_bias="lm_head_bias",
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": replace(
        GRANITE_MOE,
        mixers=mixers(Attention(sinks="sinks", materialises=True)),
        feeds={"moe": GRANITE_SHARED_MOE},
        pattern=layered(listed(full_every(4)), always("moe")),
    ),
    "granitemoeshared": replace(GRANITE_MOE, feeds={"moe": GRANITE_SHARED_MOE}),
    "jetmoe": Family(
        mixers={
            "full": Several(
                pieces=(
                    Listed(
                        prefix="self_attention.",
                        matrices=(
                            Matrix(
                                "experts.input_linear",
                                "hidden_size",
                                jet_width,
                                "column",
                                role="attention",
                                copies="num_local_experts",
                                active="num_experts_per_tok",
                            ),
                            Matrix(
                                "experts.output_linear",
                                jet_width,
                                "hidden_size",
                                "row",
                                role="attention",
                                copies="num_local_experts",
                                active="num_experts_per_tok",
                            ),
                            Matrix("experts.router.layer", "hidden_size", "num_local_experts", role="router"),
                            Matrix(
                                "kv_proj",
                                "hidden_size",
                                lambda config: 2 * jet_width(config),
                                "column",
                                role="attention",
                            ),
                        ),
                        extras=(("experts.bias", "hidden_size"),),
                        attention=Attention(
                            heads=lambda config: config.kv_heads * int(config.get("num_experts_per_tok", 2)),
                            head_dim="kv_channels",
                        ),
                    ),
                )
            )
        },
        feeds={
            "moe": Moe(
                router="router.layer",
                experts="",
                up="input_linear",
                down="output_linear",
                width="intermediate_size",
                extras=(("bias", "hidden_size"),),
            )
        },
        pattern=ALL_MOE,
    ),
    "mellum": Family(
        mixers=mixers(HEAD_NORM),
        feeds={"dense": MLP_NO_BIAS, "moe": Moe()},
        pattern=layered(listed(always("full")), listed(always("moe"), key="mlp_layer_types")),
    ),
    "minimax": replace(
        MIXTRAL,
        mixers=mixers(NO_BIAS)
        | {
            "linear": Listed(
                prefix="self_attn.",
                matrices=(
                    Matrix("qkv_proj", "hidden_size", lambda config: 3 * lightning(config), "column", role="attention"),
                    Matrix("out_proj", lightning, "hidden_size", "row", role="attention"),
                    Matrix("output_gate", "hidden_size", lightning, "column", role="attention"),
                ),
                norms=(("norm", lightning, RMS),),
            )
        },
        pattern=layered(
            listed(lambda config: ["linear" if index % 2 else "full" for index in range(config.layers)]), always("moe")
        ),
    ),
    "minimax_m2": replace(MIXTRAL, mixers=mixers(Attention(bias=False, qk_norm="width")), pattern=ALL_MOE),
    "llama4_text": Family(
        mixers=mixers(Attention(qk_norm="head", norm_names=("qk_norm", ""), norm=BARE_RMS, has_qk_norm="use_qk_norm")),
        feeds={
            "dense": Mlp(prefix="feed_forward.", bias=False, width="intermediate_size_mlp"),
            "moe": Moe(
                prefix="feed_forward.",
                router="router",
                width="intermediate_size",
                shared=replace(SHARED, prefix="feed_forward.shared_expert.", width="intermediate_size"),
            ),
        },
        pattern=layered(listed(llama4_windows), moe_listed("moe_layers", llama4_feeds)),
    ),
}
