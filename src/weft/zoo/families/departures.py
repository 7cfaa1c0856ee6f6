"""Dense decoders that depart from Llama in more than a flag: norms, residuals or heads of their own.

Not another kind of block: attention, then an MLP, as in dense.
"""

from __future__ import annotations

import math

from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import (
    ATTENTION,
    GEMMA2,
    HEAD_NORM,
    LLAMA,
    MLP,
    MLP_NO_BIAS,
    mixers,
    split_dim,
)
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp
from weft.zoo.parts import BARE_RMS, LAYER, LAYER_NO_BIAS, RMS, Listed, Matrix, Norm, Several
from weft.zoo.patterns import (
    full_every,
    layered,
    listed,
    moe_if,
    windowed,
)


def dim(config: Config) -> int:
    return config.head_dim


def only_if_xielu(config: Config) -> int:
    return int(config.get("hidden_act") == "xielu")


def modernbert_layers(config: Config) -> list[Layer]:
    """The embedding's norm serves as the first layer's: that layer has none before its attention."""
    step = int(config.get("global_attn_every_n_layers", 3))
    names = listed(full_every(step))(config)
    return [Layer(names[0], own=(("is_first", True),)), *(Layer(name) for name in names[1:])]


def doge_keys(config: Config) -> int:
    return 2 * math.isqrt(config.number("num_experts"))


def doge_experts(config: Config) -> int:
    """An expert is one row of a table."""
    return config.number("num_experts") * config.hidden


FAMILIES: dict[str, Family] = {
    "apertus": replace(
        LLAMA,
        mixers=mixers(HEAD_NORM),
        feeds={
            "dense": Mlp(
                gate="",
                bias=False,
                extras=(("act_fn.alpha_p", only_if_xielu), ("act_fn.alpha_n", only_if_xielu)),
            )
        },
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    "bitnet": replace(
        LLAMA,
        mixers=mixers(ATTENTION, Listed(norms=(("self_attn.attn_sub_norm", "hidden_size", RMS),))),
        feeds={"dense": Mlp(bias=False, norm=("ffn_sub_norm", RMS))},
    ),
    "diffllama": replace(
        LLAMA,
        mixers=mixers(
            ATTENTION,
            Listed(
                prefix="self_attn.",
                extras=tuple((f"lambda_{name}", dim) for name in ("q1", "k1", "q2", "k2")),
                norms=(("groupnorm", lambda config: 2 * config.head_dim, BARE_RMS),),
            ),
        ),
        feeds={"dense": MLP_NO_BIAS},
    ),
    "hyperclovax": replace(
        LLAMA,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            ("post_norm1", "use_post_norm"),
            ("post_norm2", "use_post_norm"),
        ),
    ),
    "nanochat": replace(
        LLAMA,
        mixers=mixers(Attention(qk_norm="head", norm=BARE_RMS)),
        feeds={"dense": Mlp(gate="", up="fc1", down="fc2", bias=False)},
        norm=BARE_RMS,
    ),
    "vaultgemma": replace(GEMMA2, norms=("input_layernorm", "pre_feedforward_layernorm")),
    "stablelm": replace(
        LLAMA,
        mixers=mixers(
            Attention(
                bias="use_qkv_bias",
                out_bias=False,
                head_dim=split_dim,
                qk_norm="every_head",
                norm_names=("q_layernorm.norms.*", "k_layernorm.norms.*"),
                norm=LAYER_NO_BIAS,
                has_qk_norm="qk_layernorm",
            )
        ),
        feeds={"dense": MLP_NO_BIAS},
        norms=(
            "input_layernorm",
            ("post_attention_layernorm", lambda config: not config.flag("use_parallel_residual")),
        ),
        norm=LAYER,
        is_parallel="use_parallel_residual",
        dropout="hidden_dropout",
    ),
    "phi": replace(
        LLAMA,
        mixers=mixers(
            Attention(
                o="dense",
                bias=True,
                qk_norm="head",
                norm_names=("q_layernorm", "k_layernorm"),
                norm=LAYER,
                has_qk_norm="qk_layernorm",
                head_dim=split_dim,
            )
        ),
        feeds={"dense": Mlp(gate="", up="fc1", down="fc2", bias=True)},
        norms=("input_layernorm",),
        norm=LAYER,
        final_norm="final_layernorm",
        head_bias=True,
        is_parallel=True,
        dropout="resid_pdrop",
        embedding_dropout="embd_pdrop",
    ),
    "persimmon": replace(
        LLAMA,
        mixers=mixers(
            Attention(
                fused="query_key_value",
                o="dense",
                bias=True,
                kv_heads="num_attention_heads",
                head_dim=split_dim,
                qk_norm="head",
                norm_names=("q_layernorm", "k_layernorm"),
                norm=LAYER,
                has_qk_norm="qk_layernorm",
            )
        ),
        feeds={"dense": Mlp(gate="", up="dense_h_to_4h", down="dense_4h_to_h", bias=True)},
        norm=LAYER,
        final_norm="final_layernorm",
        dropout="hidden_dropout",
    ),
    "hunyuan_v1_dense": replace(
        LLAMA,
        mixers=mixers(Attention(qk_norm="head", norm_names=("query_layernorm", "key_layernorm"))),
        feeds={"dense": MLP_NO_BIAS},
    ),
    "doge": replace(
        LLAMA,
        mixers=mixers(
            HEAD_NORM,
            Listed(
                prefix="self_attn.",
                matrices=(
                    Matrix(
                        "dt_proj",
                        lambda config: config.kv_heads * config.head_dim,
                        lambda config: config.kv_heads,
                        bias="attention_bias",
                        role="attention",
                    ),
                ),
                extras=(("A", lambda config: config.kv_heads),),
            ),
        ),
        feeds={
            "dense": MLP,
            "moe": Several(
                pieces=(
                    MLP,
                    Listed(
                        prefix="mlp.",
                        matrices=(Matrix("router_gate", "hidden_size", doge_keys, role="router"),),
                        extras=(("down_embed", doge_experts), ("up_embed", doge_experts)),
                    ),
                )
            ),
        },
        pattern=layered(windowed, moe_if("is_moe")),
        extras=(("input_residual", "hidden_size"), ("post_attention_residual", "hidden_size")),
        dropout="hidden_dropout",
    ),
    "modernbert-decoder": replace(
        LLAMA,
        mixers={
            "full": (bert := Attention(prefix="attn.", o="Wo", head_dim=split_dim, kv_heads="num_attention_heads")),
            "sliding": replace(bert, window=lambda config: int(config.get("local_attention", 0)) // 2),
        },
        feeds={"dense": Mlp(fused="Wi", down="Wo")},
        pattern=modernbert_layers,
        norms=(("attn_norm", lambda config: not config.flag("is_first")), "mlp_norm"),
        norm=Norm(kind="layer", bias="norm_bias"),
        final_norm="final_norm",
        outside=(
            ("embeddings.norm", lambda config: config.hidden * (1 + config.flag("norm_bias"))),
            ("lm_head.dense", lambda config: config.hidden * (config.hidden + config.flag("classifier_bias"))),
            ("lm_head.norm", lambda config: config.hidden * (1 + config.flag("norm_bias"))),
        ),
        head_bias="decoder_bias",
        dropout="mlp_dropout",
        embedding_dropout="embedding_dropout",
    ),
}
