"""Hybrids of linear attention and softmax attention: Qwen3-Next, Qwen3.5, OLMo hybrid, Kimi Linear, Bailing.

Not state-space models (see state_space). Three layers of four are usually linear; the config's list decides.
"""

from __future__ import annotations

from weft.zoo.attention import Attention, Latent
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import AFTER_NORMS, LLAMA, MLP_NO_BIAS, mixers
from weft.zoo.families.experts import QWEN2_MOE
from weft.zoo.families.shared_experts import SHARED_MOE
from weft.zoo.family import Family, Layer
from weft.zoo.parts import Matrix
from weft.zoo.patterns import (
    Names,
    always,
    layered,
    listed,
    moe_by_step,
    moe_from,
)
from weft.zoo.recurrent import (
    delta_net,
    key_width,
    kimi_delta,
    linear_width,
    value_width,
)


def linear_except_every(*, key: str, period: int) -> Names:
    def names(config: Config) -> list[str]:
        step = int(config.get(key, period))
        return ["linear" if (index + 1) % step else "full" for index in range(config.layers)]

    return names


def olmo_mixers(config: Config) -> list[str]:
    names = ["full" if index % 4 == 3 else "linear" for index in range(config.layers)]
    return names if "full" in names else [*names[:-1], "full"]


def olmo_config(config: Config) -> list[Layer]:
    """Sizes of the linear attention follow from the attention's where the config leaves them out."""
    keys = int(config.get("linear_num_key_heads", config.heads))
    dim = int(config.get("linear_key_head_dim", int(0.75 * config.hidden / keys)))
    own = (
        ("linear_num_key_heads", keys),
        ("linear_num_value_heads", int(config.get("linear_num_value_heads", config.heads))),
        ("linear_key_head_dim", dim),
        ("linear_value_head_dim", int(config.get("linear_value_head_dim", 2 * dim))),
    )
    return [Layer(name, own=own) for name in listed(olmo_mixers)(config)]


def kimi_mixers(config: Config) -> list[str]:
    given = config.get("linear_attn_config", {})
    if "full_attn_layers" in given:
        return ["full" if index + 1 in given["full_attn_layers"] else "linear" for index in range(config.layers)]
    return ["full" if index and index % 4 == 0 else "linear" for index in range(config.layers)]


def kimi_layers(config: Config) -> list[Layer]:
    given = config.get("linear_attn_config", {})
    own = (
        ("linear_head_dim", given.get("head_dim", config.get("linear_head_dim"))),
        ("linear_num_heads", given.get("num_heads", config.get("linear_num_heads"))),
        ("linear_conv_kernel_dim", given.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim"))),
    )
    feeds = listed(moe_from("first_k_dense_replace", default=1), key="mlp_layer_types")(config)
    return [Layer(name, feed, own) for name, feed in zip(listed(kimi_mixers)(config), feeds, strict=True)]


def bailing_layers(config: Config) -> list[Layer]:
    own = (
        ("linear_head_dim", config.head_dim),
        ("linear_num_heads", config.heads),
        ("linear_conv_kernel_dim", config.number("short_conv_kernel_size")),
    )
    step = config.number("layer_group_size")
    names = listed(lambda config: ["linear" if (index + 1) % step else "full" for index in range(config.layers)])(
        config
    )
    feeds = listed(moe_from("first_k_dense_replace"), key="mlp_layer_types")(config)
    return [Layer(name, feed, own) for name, feed in zip(names, feeds, strict=True)]


QWEN_ATTENTION = Attention(qk_norm="head", doubled_q=True)
QWEN_DELTA = delta_net(
    (
        Matrix("in_proj_qkvz", "hidden_size", lambda config: 2 * key_width(config) + 2 * value_width(config), "column"),
        Matrix("in_proj_ba", "hidden_size", lambda config: 2 * config.number("linear_num_value_heads"), "column"),
    )
)
QWEN35_DELTA = delta_net(
    (
        Matrix("in_proj_qkv", "hidden_size", lambda config: 2 * key_width(config) + value_width(config), "column"),
        Matrix("in_proj_z", "hidden_size", value_width, "column"),
        Matrix("in_proj_b", "hidden_size", "linear_num_value_heads", "column"),
        Matrix("in_proj_a", "hidden_size", "linear_num_value_heads", "column"),
    )
)
OLMO_DELTA = delta_net(
    (
        Matrix("q_proj", "hidden_size", key_width, "column"),
        Matrix("k_proj", "hidden_size", key_width, "column"),
        Matrix("v_proj", "hidden_size", value_width, "column"),
        Matrix("a_proj", "hidden_size", "linear_num_value_heads", "column"),
        Matrix("b_proj", "hidden_size", "linear_num_value_heads", "column"),
        Matrix("g_proj", "hidden_size", value_width, "column"),
    ),
    output="o_proj",
    norm="o_norm",
)
QWEN_PATTERN = listed(linear_except_every(key="full_attention_interval", period=4))
QWEN3_NEXT = replace(
    QWEN2_MOE,
    mixers=mixers(QWEN_ATTENTION) | {"linear": QWEN_DELTA},
    pattern=layered(QWEN_PATTERN, moe_by_step),
)

FAMILIES: dict[str, Family] = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": replace(
        LLAMA,
        mixers=mixers(QWEN_ATTENTION) | {"linear": QWEN35_DELTA},
        feeds={"dense": MLP_NO_BIAS},
        pattern=layered(QWEN_PATTERN),
    ),
    "qwen3_5_moe_text": replace(
        QWEN3_NEXT,
        mixers=mixers(QWEN_ATTENTION) | {"linear": QWEN35_DELTA},
        pattern=layered(QWEN_PATTERN, always("moe")),
    ),
    "olmo_hybrid": Family(
        mixers={"full": Attention(qk_norm="width"), "linear": OLMO_DELTA},
        feeds={"dense": MLP_NO_BIAS},
        pattern=olmo_config,
        norms=AFTER_NORMS,
        own_norms={"linear": ("input_layernorm", "post_attention_layernorm")},
    ),
    "kimi_linear": Family(
        mixers={
            "full": Latent(),
            "linear": kimi_delta(
                (
                    Matrix("forget_gate.f_a_proj", "hidden_size", "linear_head_dim"),
                    Matrix("forget_gate.f_b_proj", "linear_head_dim", linear_width, "column"),
                    Matrix("g_a_proj", "hidden_size", "linear_head_dim"),
                    Matrix("g_b_proj", "linear_head_dim", linear_width, "column"),
                )
            ),
        },
        feeds={"dense": MLP_NO_BIAS, "moe": SHARED_MOE},
        pattern=kimi_layers,
        tied=False,
    ),
    "bailing_hybrid": Family(
        mixers={
            "full": Latent(gate="g_proj", gate_size="heads"),
            "linear": kimi_delta(
                (
                    Matrix("forget_gate.f_proj", "hidden_size", linear_width, "column"),
                    Matrix("g_proj", "hidden_size", linear_width, "column"),
                )
            ),
        },
        feeds={"dense": MLP_NO_BIAS, "moe": SHARED_MOE},
        pattern=bailing_layers,
        tied=False,
    ),
}
