"""Gated recurrences and short convolutions: LFM2, RecurrentGemma, RWKV, xLSTM.

Not Mamba (see state_space). None of these mixers has attention scores.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import split_dim
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import LAYER, RMS, Listed, Matrix, Norm, Several
from weft.zoo.patterns import (
    layered,
    listed,
    moe_from,
)
from weft.zoo.recurrent import (
    convolution,
)


def lfm_width(config: Config) -> int:
    """Two thirds of the given width, scaled, rounded up to the block multiple."""
    width = int(config.get("block_ff_dim", config.number("intermediate_size")))
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = config.number("block_multiple_of")
    return multiple * ((width + multiple - 1) // multiple)


def lfm_mixers(config: Config) -> list[str]:
    attention = config.get("full_attn_idxs")
    return ["full" if attention is None or index in attention else "conv" for index in range(config.layers)]


def recurrent_gemma_mixers(config: Config) -> list[str]:
    kinds = config.get("block_types", ["recurrent", "recurrent", "attention"])
    return ["sliding" if kinds[index % len(kinds)] == "attention" else "linear" for index in range(config.layers)]


def lru(config: Config) -> int:
    return int(config.get("lru_width", config.hidden))


def lru_gate(config: Config) -> int:
    """Block-diagonal: one square of the block width a head."""
    return config.heads * (lru(config) // config.heads) ** 2


def rwkv_inner(config: Config) -> int:
    return int(config.get("attention_hidden_size", config.hidden))


def rwkv_width(config: Config) -> int:
    return int(config.get("intermediate_size", 4 * config.hidden))


def with_first(config: Config) -> list[Layer]:
    return [Layer("linear", own=(("is_first", True),)), *[Layer("linear")] * (config.layers - 1)]


def rounded(value: float, multiple: int) -> int:
    return int(((value + multiple - 1) // multiple) * multiple)


def xlstm_keys(config: Config) -> int:
    return int(config.hidden * config.get("qk_dim_factor", 0.5))


def xlstm_values(config: Config) -> int:
    return int(config.hidden * config.get("v_dim_factor", 1.0))


def xlstm_width(config: Config) -> int:
    return rounded(config.hidden * config.get("ffn_proj_factor", 2.667), config.number("ffn_round_up_to_multiple_of"))


def is_fused(config: Config) -> bool:
    return str(config.get("weight_mode", "single")) == "fused"


def is_single(config: Config) -> bool:
    return not is_fused(config)


LFM_MLP = Mlp(
    prefix="feed_forward.", gate="w1", up="w3", down="w2", bias=False, width=lfm_width, fixed_activation="silu"
)
LFM2 = Family(
    mixers={
        "full": Attention(o="out_proj", bias=False, qk_norm="head", norm_names=("q_layernorm", "k_layernorm")),
        "conv": Listed(
            prefix="conv.",
            matrices=(
                Matrix("in_proj", "hidden_size", lambda config: 3 * config.hidden, "column", "conv_bias"),
                Matrix("out_proj", "hidden_size", "hidden_size", "row", "conv_bias"),
            ),
            extras=convolution("conv", channels="hidden_size", kernel="conv_L_cache", bias="conv_bias"),
        ),
    },
    feeds={"dense": LFM_MLP},
    pattern=layered(listed(lfm_mixers)),
    norms=("operator_norm", "ffn_norm"),
    final_norm="embedding_norm",
)

FAMILIES: dict[str, Family] = {
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2,
        feeds={
            "dense": replace(LFM_MLP, width="intermediate_size"),
            "moe": Moe(prefix="feed_forward.", fixed_activation="silu"),
        },
        pattern=layered(listed(lfm_mixers), moe_from("num_dense_layers")),
    ),
    "recurrent_gemma": Family(
        mixers={
            "sliding": Attention(
                prefix="temporal_block.",
                bias="attention_bias",
                out_bias=True,
                head_dim=split_dim,
                window="attention_window_size",
            ),
            "linear": Listed(
                prefix="temporal_block.",
                matrices=(
                    Matrix("linear_y", "hidden_size", lru, "column", True),
                    Matrix("linear_x", "hidden_size", lru, "column", True),
                    Matrix("linear_out", lru, "hidden_size", "row", True),
                ),
                extras=(
                    *convolution("conv_1d", channels=lru, kernel="conv1d_width", bias=True),
                    ("rg_lru.recurrent_param", lru),
                    ("rg_lru.input_gate_weight", lru_gate),
                    ("rg_lru.input_gate_bias", lru),
                    ("rg_lru.recurrent_gate_weight", lru_gate),
                    ("rg_lru.recurrent_gate_bias", lru),
                ),
            ),
        },
        feeds={
            "dense": Mlp(prefix="mlp_block.", bias=True, width=lambda config: config.number("intermediate_size") // 2)
        },
        pattern=layered(recurrent_gemma_mixers),
        norms=("temporal_pre_norm", "channel_pre_norm"),
        final_norm="final_norm",
        scaled_embedding=True,
    ),
    "rwkv": Family(
        mixers={
            "linear": Listed(
                prefix="attention.",
                matrices=(
                    *(Matrix(name, "hidden_size", rwkv_inner, "column") for name in ("key", "value", "receptance")),
                    Matrix("output", rwkv_inner, "hidden_size", "row"),
                ),
                extras=(
                    ("time_decay", rwkv_inner),
                    ("time_first", rwkv_inner),
                    ("time_mix_key", "hidden_size"),
                    ("time_mix_value", "hidden_size"),
                    ("time_mix_receptance", "hidden_size"),
                ),
            )
        },
        feeds={
            "dense": Several(
                pieces=(
                    Mlp(
                        prefix="feed_forward.",
                        gate="",
                        up="key",
                        down="value",
                        bias=False,
                        width=rwkv_width,
                        fixed_activation="relu2",
                    ),
                    Listed(
                        prefix="feed_forward.",
                        matrices=(Matrix("receptance", "hidden_size", "hidden_size"),),
                        extras=(("time_mix_key", "hidden_size"), ("time_mix_receptance", "hidden_size")),
                    ),
                )
            )
        },
        pattern=with_first,
        norms=(("pre_ln", "is_first"), "ln1", "ln2"),
        norm=LAYER,
        final_norm="ln_out",
    ),
    "xlstm": Family(
        mixers={
            "linear": Listed(
                prefix="mlstm_layer.",
                matrices=(
                    Matrix("q", "hidden_size", xlstm_keys, "column", "use_bias", when=is_single),
                    Matrix("k", "hidden_size", xlstm_keys, "column", "use_bias", when=is_single),
                    Matrix("v", "hidden_size", xlstm_values, "column", "use_bias", when=is_single),
                    Matrix("ogate_preact", "hidden_size", xlstm_values, "column", "use_bias", when=is_single),
                    Matrix("igate_preact", "hidden_size", "num_heads", "column", True, when=is_single),
                    Matrix("fgate_preact", "hidden_size", "num_heads", "column", True, when=is_single),
                    Matrix(
                        "qkv_opreact",
                        "hidden_size",
                        lambda config: 2 * xlstm_keys(config) + 2 * xlstm_values(config),
                        "column",
                        "use_bias",
                        when=is_fused,
                    ),
                    Matrix(
                        "ifgate_preact",
                        "hidden_size",
                        lambda config: 2 * config.number("num_heads"),
                        "column",
                        True,
                        when=is_fused,
                    ),
                    Matrix("out_proj", xlstm_values, "hidden_size", "row", "use_bias"),
                ),
                norms=(("multihead_norm", xlstm_values, Norm(kind="layer", bias="use_bias")),),
            )
        },
        feeds={
            "dense": Mlp(
                prefix="ffn.",
                gate="proj_up_gate",
                up="proj_up",
                down="proj_down",
                bias="use_bias",
                width=xlstm_width,
                fixed_activation="silu",
            ),
        },
        pattern=lambda config: [Layer("linear")] * config.layers,
        norms=("norm_mlstm", "norm_ffn"),
        norm=Norm(bias="use_bias"),
        final=RMS,
        final_norm="out_norm",
        tied=False,
    ),
}
