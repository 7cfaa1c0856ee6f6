"""Families that share a block with no other: Zaya, Inkling, Mllama, Moshi, XLNet, CPM-Ant.

Not a place for a type that is a variation of another. Everything is declared from the same pieces.
"""

from __future__ import annotations

from weft.core.model_shape import Style
from weft.zoo.attention import Attention
from weft.zoo.config import Config, Size
from weft.zoo.families.compressed import q_width
from weft.zoo.families.dense import MLP_NO_BIAS, NO_BIAS, mixers, split_dim
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp, Moe
from weft.zoo.parts import BARE_RMS, LAYER, LAYER_NO_BIAS, RMS, Listed, Matrix, Several
from weft.zoo.patterns import (
    always,
    layered,
    listed,
    windowed,
)
from weft.zoo.recurrent import (
    convolution,
)


def kv_width(config: Config) -> int:
    return config.kv_heads * config.head_dim


def zaya_layers(config: Config) -> list[Layer]:
    names = {"hybrid": "full", "hybrid_sliding": "sliding"}
    given = config.get("layer_types") or ["hybrid"] * config.layers
    return [
        Layer(names.get(str(name), "full"), "moe", own=(("is_first", True),) if index == 0 else ())
        for index, name in enumerate(given)
    ]


def zaya_attention(window: str | None) -> Listed:
    return Listed(
        prefix="self_attn.",
        matrices=(
            Matrix("qkv_proj.q_proj", "hidden_size", q_width, "column", "attention_bias", "attention"),
            Matrix("qkv_proj.k_proj", "hidden_size", kv_width, "column", "attention_bias", "attention"),
            *(
                Matrix(f"qkv_proj.v_proj_{name}", "hidden_size", lambda config: kv_width(config) // 2, "column",
                       "attention_bias", "attention")
                for name in ("current", "delayed")
            ),
            Matrix("o_proj", q_width, "hidden_size", "row", "attention_bias", "attention"),
        ),
        extras=(
            *convolution(
                "qkv_proj.conv_qk_depthwise", channels=lambda config: q_width(config) + kv_width(config),
                kernel="cca_time0", bias=True,
            ),
            (
                "qkv_proj.conv_qk_grouped.weight",
                lambda config: (q_width(config) + kv_width(config)) * config.head_dim * config.number("cca_time1"),
            ),
            ("qkv_proj.conv_qk_grouped.bias", lambda config: q_width(config) + kv_width(config)),
            ("qk_norm.temp", lambda config: config.kv_heads),
        ),
        attention=Attention(window=window),
    )  # fmt: skip


def inkling_layers(config: Config) -> list[Layer]:
    local = config.get("local_layer_ids")
    names = config.get("layer_types") or [
        "hybrid_sliding" if (index in local if local is not None else (index + 1) % 6) else "hybrid"
        for index in range(config.layers)
    ]
    feeds = listed(always("moe"), key="mlp_layer_types")(config)
    return [
        Layer("sliding" if name == "hybrid_sliding" else "full", feed) for name, feed in zip(names, feeds, strict=True)
    ]


def inkling_mixer(prefix: str, *, extent: str, window: str | None) -> Several:
    heads, kv_heads, dim = f"{prefix}num_attention_heads", f"{prefix}num_key_value_heads", f"{prefix}head_dim"

    def channels(config: Config) -> int:
        return config.number(kv_heads) * config.number(dim)

    return Several(
        pieces=(
            Attention(
                bias=False, heads=heads, kv_heads=kv_heads, head_dim=dim, qk_norm="head", window=window, rotary=False
            ),
            Listed(
                prefix="self_attn.",
                matrices=(
                    Matrix("r_proj", "hidden_size", lambda config: config.number(heads) * config.number("d_rel"),
                           "column", role="attention"),
                ),
                extras=(
                    *convolution("k_sconv.conv1d", channels=channels, kernel="conv_kernel_size"),
                    *convolution("v_sconv.conv1d", channels=channels, kernel="conv_kernel_size"),
                    ("rel_logits_proj.proj", lambda config: config.number("d_rel") * config.number(extent)),
                ),
            ),
        )
    )  # fmt: skip


def stack_layers(config: Config) -> int:
    return config.layers if config.get("num_layers_per_stack") is None else config.count("num_layers_per_stack")


def mllama_mixers(config: Config) -> list[str]:
    crossing = set(config.get("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38]))
    return ["cross" if index in crossing else "full" for index in range(config.layers)]


ZAYA_ROUTER = Listed(
    prefix="mlp.gate.",
    matrices=(
        Matrix("down_proj", "hidden_size", "router_hidden_size", bias=True, role="router"),
        Matrix("router_mlp.fc1", "router_hidden_size", "router_hidden_size", bias=True, role="router"),
        Matrix("router_mlp.fc2", "router_hidden_size", "router_hidden_size", bias=True, role="router"),
        Matrix(
            "router_mlp.out_proj", "router_hidden_size", lambda config: config.number("num_experts") + 1, role="router"
        ),
    ),
    norms=(("router_mlp.norm", "router_hidden_size", RMS),),
    extras=(
        ("router_states_scale", lambda config: config.number("router_hidden_size") * (not config.flag("is_first"))),
    ),
)
ZAYA = Family(
    mixers={"full": zaya_attention(None), "sliding": zaya_attention("sliding_window")},
    feeds={"moe": Several(pieces=(ZAYA_ROUTER, Moe(router="")))},
    pattern=zaya_layers,
    extras=tuple(
        (f"post_{half}_residual_scale.{name}", "hidden_size")
        for half in ("attention", "mlp")
        for name in ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
    ),
    outside=(("input_hidden_states_scale", "hidden_size"), ("input_hidden_states_bias", "hidden_size")),
    head_bias="lm_head_bias",
)


def inkling_shared(name: str, rows: Size, out: Size, style: Style) -> Matrix:
    return Matrix(name, rows, out, style, role="shared_expert", copies="n_shared_experts", active="n_shared_experts")


INKLING_SHARED = Listed(
    prefix="mlp.shared_experts.",
    matrices=(
        inkling_shared("gate_proj", "hidden_size", "moe_intermediate_size", "column"),
        inkling_shared("up_proj", "hidden_size", "moe_intermediate_size", "column"),
        inkling_shared("down_proj", "moe_intermediate_size", "hidden_size", "row"),
    ),
)
INKLING = Family(
    mixers={
        "full": inkling_mixer("", extent="rel_extent", window=None),
        "sliding": inkling_mixer("swa_", extent="sliding_window_size", window="sliding_window_size"),
    },
    feeds={
        "dense": Several(pieces=(MLP_NO_BIAS, Listed(extras=(("mlp.global_scale", 1),)))),
        "moe": Several(
            pieces=(
                Moe(
                    router_size=lambda config: config.number("n_routed_experts") + config.number("n_shared_experts"),
                    extras=(("gate.global_scale", 1),),
                ),
                INKLING_SHARED,
            )
        ),
    },
    pattern=inkling_layers,
    extras=(
        *convolution("attn_sconv.conv1d", channels="hidden_size", kernel="conv_kernel_size"),
        *convolution("mlp_sconv.conv1d", channels="hidden_size", kernel="conv_kernel_size"),
    ),
    outside=(("embed_norm", "hidden_size"),),
)

# --- DBRX: sizes in nested tables, experts as three tensors


def dbrx(table: str, key: str, default: int) -> Size:
    return lambda config: int((config.get(table) or {}).get(key, default))


DBRX_EXPERTS, DBRX_TOP_K = dbrx("ffn_config", "moe_num_experts", 4), dbrx("ffn_config", "moe_top_k", 1)
DBRX_WIDTH = dbrx("ffn_config", "ffn_hidden_size", 3584)


def dbrx_expert(name: str, rows: Size, out: Size, style: Style) -> Matrix:
    return Matrix(name, rows, out, style, role="expert", copies=DBRX_EXPERTS, active=DBRX_TOP_K)


DBRX = Family(
    mixers={
        "full": Attention(
            prefix="norm_attn_norm.attn.", fused="Wqkv", o="out_proj", bias=False, head_dim=split_dim,
            kv_heads=dbrx("attn_config", "kv_n_heads", 1), dropout="",
        )
    },
    feeds={
        "moe": Several(
            pieces=(
                Moe(router="", experts="", count=DBRX_EXPERTS, top_k=DBRX_TOP_K, width=DBRX_WIDTH, is_listed=True),
                Listed(
                    prefix="ffn.",
                    matrices=(
                        Matrix("router.layer", "hidden_size", DBRX_EXPERTS, role="router"),
                        dbrx_expert("experts.mlp.w1", "hidden_size", DBRX_WIDTH, "column"),
                        dbrx_expert("experts.mlp.v1", "hidden_size", DBRX_WIDTH, "column"),
                        dbrx_expert("experts.mlp.w2", DBRX_WIDTH, "hidden_size", "row"),
                    ),
                ),
            )
        )
    },
    pattern=layered(always("full"), always("moe")),
    norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
    norm=LAYER_NO_BIAS,
    final_norm="norm_f",
    dropout="resid_pdrop",
    embedding_dropout="emb_pdrop",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "zaya": ZAYA,
    "inkling_text": INKLING,
    "mllama_text_model": Family(
        mixers={
            "full": NO_BIAS,
            "cross": Several(
                pieces=(
                    Attention(prefix="cross_attn.", bias=False, qk_norm="head", is_idle=True),
                    Listed(extras=(("cross_attn_attn_gate", 1), ("cross_attn_mlp_gate", 1))),
                )
            ),
        },
        feeds={"dense": MLP_NO_BIAS},
        pattern=layered(mllama_mixers),
        outside=(("embed_tokens.special", lambda config: 8 * config.hidden),),
        tied=False,
    ),
    "moshi": Family(
        mixers=mixers(
            Attention(q="q_proj.linear", k="k_proj.linear", v="v_proj.linear", o="o_proj.linear", bias=False)
        ),
        feeds={"dense": Mlp(fused="fc1", down="fc2", bias=False, width=lambda config: config.number("ffn_dim") // 2)},
        pattern=layered(windowed),
        outside=(("embed_tokens.special", "hidden_size"),),
        tied=False,
    ),
    "hrm_text": Family(
        mixers={"full": Attention(kv_heads="num_attention_heads", gate="gate_proj", gate_bias="attention_bias")},
        feeds={"dense": Mlp()},
        pattern=lambda config: [Layer()] * (2 * stack_layers(config)),
        norm=BARE_RMS,
        outside=(("z_L_init", "hidden_size"),),
        scaled_embedding=True,
        notes=("both stacks run several times a token: their FLOPs are counted once",),
    ),
    "dbrx": DBRX,
    "cpmant": Family(
        mixers={
            "full": Attention(
                prefix="self_att.self_attention.",
                q="project_q",
                k="project_k",
                v="project_v",
                o="attention_out",
                bias=False,
                kv_heads="num_attention_heads",
                head_dim="dim_head",
                rotary=False,
                materialises=True,
                dropout="dropout_p",
            )
        },
        feeds={
            "dense": Mlp(
                prefix="ffn.ffn.",
                gate="w_in.w_0",
                up="w_in.w_1",
                down="w_out",
                bias=False,
                width="dim_ff",
                fixed_activation="gelu",
            )
        },
        norms=("self_att.layernorm_before_attention", "ffn.layernorm_before_ffn"),
        final_norm="output_layernorm",
        outside=(
            ("segment_embedding", lambda config: config.number("segment_types") * config.hidden),
            (
                "input_embedding.prompts",
                lambda config: config.number("prompt_types") * config.number("prompt_length") * config.hidden,
            ),
            (
                "position_bias",
                lambda config: (
                    config.heads * (config.number("segment_types") ** 2 + config.number("position_bias_num_buckets"))
                ),
            ),
        ),
        dropout="dropout_p",
        tied=False,
    ),
    "xlnet": Family(
        mixers={
            "full": Listed(
                prefix="rel_attn.",
                matrices=(
                    *(Matrix(name, "hidden_size", q_width, "column", role="attention") for name in "qkvr"),
                    Matrix("o", q_width, "hidden_size", "row", role="attention"),
                ),
                extras=(
                    ("r_r_bias", q_width),
                    ("r_s_bias", q_width),
                    ("r_w_bias", q_width),
                    ("seg_embed", lambda config: 2 * q_width(config)),
                ),
                attention=Attention(
                    heads="n_head",
                    kv_heads="n_head",
                    head_dim=split_dim,
                    rotary=False,
                    materialises=True,
                    dropout="dropout",
                ),
            )
        },
        feeds={
            "dense": Mlp(
                prefix="ff.",
                gate="",
                up="layer_1",
                down="layer_2",
                bias=True,
                width="d_inner",
                activation="ff_activation",
            )
        },
        norms=("rel_attn.layer_norm", "ff.layer_norm"),
        norm=LAYER,
        final_norm="",
        outside=(("mask_emb", "hidden_size"),),
        head_bias=True,
        dropout="dropout",
    ),
}
