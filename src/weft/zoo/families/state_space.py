"""State-space models and their hybrids with attention: Mamba, Jamba, Bamba, Granite 4, Falcon H1, Nemotron H.

Not linear attention (see linear_attention). What a layer is comes from the config's list or the family's period.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config, Size
from weft.zoo.declared import replace
from weft.zoo.families.dense import ATTENTION, split_dim
from weft.zoo.families.experts import GRANITE_MOE, GRANITE_SHARED
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import Norm, Several
from weft.zoo.patterns import (
    always,
    layered,
    listed,
)
from weft.zoo.recurrent import (
    dt_rank,
    mamba1,
    mamba2,
)


def expanded(key: str) -> Size:
    return lambda config: int(config.get(key, 2) * config.hidden)


def jamba_layers(config: Config) -> list[Layer]:
    def is_at(name: str, index: int) -> bool:
        return index % config.number(f"{name}_layer_period") == config.number(f"{name}_layer_offset")

    has_experts = config.number("num_experts") > 1
    return [
        Layer(
            "full" if is_at("attn", index) else "linear", "moe" if has_experts and is_at("expert", index) else "dense"
        )
        for index in range(config.layers)
    ]


def bamba_mixers(config: Config) -> list[str]:
    attention = set(config.get("attn_layer_indices", []))
    return ["full" if index in attention else "linear" for index in range(config.layers)]


def granite_hybrid_feeds(config: Config) -> list[str]:
    return ["moe" if config.number("num_local_experts") > 0 else "dense"] * config.layers


def nemotron_layers(config: Config) -> list[Layer]:
    """A layer is one thing: a Mamba, attention, an MLP or experts. Old configs write it as letters."""
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    pattern = config.get("hybrid_override_pattern")
    given = (
        config.get("layer_types") or config.get("layers_block_type") or [letters[each] for each in pattern or "ME*-"]
    )
    kinds = {
        "linear_attention": Layer("linear", ""), "mamba": Layer("linear", ""), "mlp": Layer("", "dense"),
        "moe": Layer("", "moe"), "full_attention": Layer("full", ""), "attention": Layer("full", ""),
    }  # fmt: skip
    return [kinds[str(name)] for name in given]


MAMBA = Family(
    mixers={
        "linear": mamba1(
            "mixer.", inner=expanded("expand"), state="state_size", kernel="conv_kernel",
            rank=dt_rank("time_step_rank"), bias="use_bias", conv_bias="use_conv_bias",
        )
    },
    feeds={},
    pattern=lambda config: [Layer("linear", "")] * config.layers,
    norms=("norm",),
    final_norm="norm_f",
)  # fmt: skip
GRANITE_MAMBA = mamba2(
    "mamba.", inner=expanded("mamba_expand"), state="mamba_d_state", kernel="mamba_d_conv", heads="mamba_n_heads",
    groups="mamba_n_groups", bias="mamba_proj_bias", conv_bias="mamba_conv_bias",
)  # fmt: skip
FEED = Mlp(prefix="feed_forward.", bias=False)

FAMILIES: dict[str, Family] = {
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": replace(
        MAMBA,
        mixers={
            "linear": mamba2(
                "mixer.",
                inner=expanded("expand"),
                state="state_size",
                kernel="conv_kernel",
                heads="num_heads",
                groups="n_groups",
                bias="use_bias",
                conv_bias="use_conv_bias",
            )
        },
    ),
    "jamba": Family(
        mixers={
            "full": Attention(bias=False, head_dim=split_dim, rotary=False),
            "linear": mamba1(
                "mamba.",
                inner=expanded("mamba_expand"),
                state="mamba_d_state",
                kernel="mamba_d_conv",
                rank=dt_rank("mamba_dt_rank"),
                bias="mamba_proj_bias",
                conv_bias="mamba_conv_bias",
                has_norms=True,
            ),
        },
        feeds={"dense": FEED, "moe": Moe(prefix="feed_forward.", router="router", width="intermediate_size")},
        pattern=jamba_layers,
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="final_layernorm",
    ),
    "bamba": Family(
        mixers={"full": ATTENTION, "linear": GRANITE_MAMBA},
        feeds={"dense": Mlp(prefix="feed_forward.")},
        pattern=layered(bamba_mixers),
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="final_layernorm",
    ),
    "granitemoehybrid": replace(
        GRANITE_MOE,
        mixers={"full": ATTENTION, "linear": GRANITE_MAMBA},
        feeds={
            "moe": Several(pieces=(GRANITE_MOE.feeds["moe"], GRANITE_SHARED)),
            "dense": replace(GRANITE_SHARED, role="mlp"),
        },
        pattern=layered(listed(always("linear")), granite_hybrid_feeds),
    ),
    "falcon_h1": Family(
        mixers={
            "full": Several(
                pieces=(
                    ATTENTION,
                    mamba2(
                        "mamba.",
                        inner=lambda config: int(
                            config.get("mamba_d_ssm", config.get("mamba_expand", 2) * config.hidden)
                        ),
                        state="mamba_d_state",
                        kernel="mamba_d_conv",
                        heads="mamba_n_heads",
                        groups="mamba_n_groups",
                        bias="mamba_proj_bias",
                        conv_bias="mamba_conv_bias",
                        out_bias="projectors_bias",
                        norm=Norm(weight="mamba_rms_norm"),
                    ),
                )
            )
        },
        feeds={"dense": Mlp(prefix="feed_forward.")},
        norms=("input_layernorm", "pre_ff_layernorm"),
        final_norm="final_layernorm",
    ),
    "nemotron_h": Family(
        mixers={
            "full": Attention(prefix="mixer.", bias=False, rotary=False),
            "linear": mamba2(
                "mixer.",
                inner=lambda config: config.number("mamba_num_heads") * config.number("mamba_head_dim"),
                state="ssm_state_size",
                kernel="conv_kernel",
                heads="mamba_num_heads",
                groups="n_groups",
                bias="use_bias",
                conv_bias="use_conv_bias",
            ),
        },
        feeds={
            "dense": Mlp(prefix="mixer.", gate="", activation="mlp_hidden_act"),
            "moe": Moe(
                prefix="mixer.",
                up="up_proj",
                count="n_routed_experts",
                is_gated=False,
                activation="mlp_hidden_act",
                shared=Mlp(
                    prefix="mixer.shared_experts.",
                    gate="",
                    role="shared_expert",
                    activation="mlp_hidden_act",
                    width="moe_shared_expert_intermediate_size",
                ),
            ),
        },
        pattern=nemotron_layers,
        norms=("norm",),
        final_norm="norm_f",
        tied=False,
    ),
}
