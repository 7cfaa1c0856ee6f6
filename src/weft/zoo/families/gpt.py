"""Decoders of the GPT kind: plain MLPs, layer norms with bias, often one fused matrix for q, k, v.

Not the Llama kind (see dense). Inner width = 4 x hidden wherever the config leaves it out.
"""

from __future__ import annotations

from weft.core.errors import ModelError
from weft.zoo.attention import Attention
from weft.zoo.config import Config
from weft.zoo.declared import replace
from weft.zoo.families.dense import split_dim
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp
from weft.zoo.parts import LAYER, LAYER_NO_BIAS, Listed, Norm, Several


def four_times(config: Config) -> int:
    given = config.get("intermediate_size")
    return int(given) if given is not None else 4 * config.hidden


def exactly_four_times(config: Config) -> int:
    return 4 * config.hidden


ATTENTION = Attention(prefix="attn.", bias=True, kv_heads="num_attention_heads", head_dim=split_dim)
GPT2_MLP = Mlp(gate="", up="c_fc", down="c_proj", bias=True, width=four_times)
GPT2 = Family(
    mixers={"full": replace(ATTENTION, fused="c_attn", o="c_proj", rotary=False)},
    feeds={"dense": GPT2_MLP},
    norms=("ln_1", "ln_2"),
    norm=LAYER,
    final_norm="ln_f",
    positions="max_position_embeddings",
    dropout="resid_pdrop",
    embedding_dropout="embd_pdrop",
    is_transposed=True,
)


def falcon_kv_heads(config: Config) -> int:
    if config.flag("new_decoder_architecture"):
        return config.kv_heads
    return 1 if config.flag("multi_query") else config.heads


def falcon_two_norms(config: Config) -> bool:
    """Both halves of a parallel block have a norm of their own, by default in the new architecture only."""
    given = config.get("num_ln_in_parallel_attn")
    two = given == 2 if given is not None else config.flag("new_decoder_architecture")
    return two and config.flag("parallel_attn")


def falcon_own_norm(config: Config) -> bool:
    return not config.flag("parallel_attn")


def neo_layers(config: Config) -> list[Layer]:
    """attention_types lists (names, how often) pairs; local layers slide."""
    listed = config.get("attention_types", [[["global", "local"], 12]])
    names = [name for group, times in listed for _ in range(times) for name in group]
    if len(names) != config.layers:
        raise ModelError(
            f"attention_types of the gpt_neo config name {len(names)} layers of {config.layers}",
            hint="give attention_types as many layers as num_layers",
        )
    return [Layer("sliding" if name == "local" else "full") for name in names]


def with_last(config: Config) -> list[Layer]:
    return [Layer()] * (config.layers - 1) + [Layer(own=(("is_last", True),))]


def opt_projection(config: Config) -> int:
    width = int(config.get("word_embed_proj_dim", config.hidden))
    return 0 if width == config.hidden else width * config.hidden


def opt_final(config: Config) -> int:
    has_norm = config.flag("do_layer_norm_before") and not config.flag("_remove_final_layer_norm")
    return 2 * config.hidden * has_norm * config.flag("layer_norm_elementwise_affine")


EAGER = replace(ATTENTION, materialises=True)
GPTJ = Family(
    mixers={"full": replace(EAGER, o="out_proj", bias=False)},
    feeds={"dense": Mlp(gate="", up="fc_in", down="fc_out", bias=True, width=four_times)},
    norms=("ln_1",),
    norm=LAYER,
    final_norm="ln_f",
    head_bias=True,
    is_parallel=True,
    dropout="resid_pdrop",
    embedding_dropout="embd_pdrop",
)
NEOX_MLP = Mlp(gate="", up="dense_h_to_4h", down="dense_4h_to_h", bias=True)
FAIRSEQ_MLP = Mlp(prefix="", gate="", up="fc1", down="fc2", bias=True)

FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    "gpt-sw3": GPT2,
    "gpt_bigcode": replace(
        GPT2,
        is_transposed=False,
        mixers={
            "full": replace(
                ATTENTION,
                fused="c_attn",
                o="c_proj",
                rotary=False,
                kv_heads=lambda config: 1 if config.flag("multi_query") else config.heads,
            )
        },
    ),
    "openai-gpt": replace(
        GPT2,
        mixers={"full": replace(EAGER, fused="c_attn", o="c_proj", rotary=False)},
        feeds={"dense": replace(GPT2_MLP, width=exactly_four_times, fixed_activation="gelu_new")},
        final_norm="",
    ),
    "gpt_neo": Family(
        mixers={
            "full": (
                neo := replace(EAGER, prefix="attn.attention.", o="out_proj", bias=False, out_bias=True, rotary=False)
            ),
            "sliding": replace(neo, window="window_size"),
        },
        feeds={"dense": GPT2_MLP},
        pattern=neo_layers,
        norms=("ln_1", "ln_2"),
        norm=LAYER,
        final_norm="ln_f",
        positions="max_position_embeddings",
        dropout="resid_dropout",
        embedding_dropout="embed_dropout",
    ),
    "gptj": GPTJ,
    "codegen": replace(GPTJ, mixers={"full": replace(EAGER, fused="qkv_proj", o="out_proj", bias=False)}),
    "gpt_neox": Family(
        mixers={
            "full": replace(ATTENTION, prefix="attention.", fused="query_key_value", o="dense", bias="attention_bias")
        },
        feeds={"dense": NEOX_MLP},
        norm=LAYER,
        final_norm="final_layer_norm",
        is_parallel="use_parallel_residual",
        dropout="hidden_dropout",
        embedding_dropout="hidden_dropout",
    ),
    "gpt_neox_japanese": Family(
        mixers={
            "full": Several(
                pieces=(
                    replace(EAGER, prefix="attention.", fused="query_key_value", o="dense", bias=False),
                    Listed(extras=(("attention.dense_bias", lambda config: config.hidden * config.flag("is_last")),)),
                )
            )
        },
        feeds={
            "dense": replace(
                NEOX_MLP,
                bias=False,
                width=lambda config: config.hidden * config.number("intermediate_multiple_size"),
            )
        },
        pattern=with_last,
        norm=LAYER,
        final_norm="final_layer_norm",
        dropout="hidden_dropout",
    ),
    "bloom": Family(
        mixers={"full": replace(EAGER, prefix="self_attention.", fused="query_key_value", o="dense", rotary=False)},
        feeds={"dense": replace(NEOX_MLP, width=exactly_four_times, fixed_activation="bloom_gelu")},
        norm=LAYER,
        final_norm="ln_f",
        outside=(("word_embeddings_layernorm", lambda config: 2 * config.hidden),),
        dropout="hidden_dropout",
    ),
    "falcon": Family(
        mixers={
            "full": replace(
                ATTENTION,
                prefix="self_attention.",
                fused="query_key_value",
                o="dense",
                bias="bias",
                kv_heads=falcon_kv_heads,
                rotary=lambda config: not config.flag("alibi"),
            )
        },
        feeds={"dense": replace(NEOX_MLP, bias="bias", width=four_times, activation="activation")},
        norms=(
            ("ln_attn", falcon_two_norms),
            ("ln_mlp", falcon_two_norms),
            ("input_layernorm", lambda config: not falcon_two_norms(config)),
            ("post_attention_layernorm", falcon_own_norm),
        ),
        norm=LAYER,
        final_norm="ln_f",
        is_parallel=lambda config: config.flag("parallel_attn") or config.flag("new_decoder_architecture"),
        dropout="hidden_dropout",
    ),
    "mpt": Family(
        mixers={"full": replace(EAGER, fused="Wqkv", o="out_proj", bias=False, rotary=False)},
        feeds={"dense": Mlp(prefix="ffn.", gate="", bias=False, width=exactly_four_times, fixed_activation="gelu")},
        norms=("norm_1", "norm_2"),
        norm=LAYER_NO_BIAS,
        final_norm="norm_f",
        dropout="attn_pdrop",
    ),
    "opt": Family(
        mixers={"full": replace(ATTENTION, prefix="self_attn.", o="out_proj", bias="enable_bias", rotary=False)},
        feeds={"dense": replace(FAIRSEQ_MLP, bias="enable_bias", width="ffn_dim")},
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norm=Norm(kind="layer", weight="layer_norm_elementwise_affine", bias="layer_norm_elementwise_affine"),
        final_norm="",
        final=LAYER,
        outside=(("project_in", opt_projection), ("project_out", opt_projection), ("final_layer_norm", opt_final)),
        embedding_size=lambda config: int(config.get("word_embed_proj_dim", config.hidden)),
        positions=lambda config: config.number("max_position_embeddings") + 2,
        dropout="dropout",
    ),
    "ctrl": Family(
        mixers={
            "full": replace(ATTENTION, prefix="multi_head_attention.", q="Wq", k="Wk", v="Wv", o="dense", rotary=False)
        },
        feeds={"dense": Mlp(prefix="ffn.", gate="", up="0", down="2", bias=True, width="dff", fixed_activation="relu")},
        norms=("layernorm1", "layernorm2"),
        norm=LAYER,
        final_norm="layernorm",
        head_bias=True,
        dropout="resid_pdrop",
        embedding_dropout="embd_pdrop",
    ),
    "xglm": Family(
        mixers={"full": replace(EAGER, prefix="self_attn.", o="out_proj", rotary=False)},
        feeds={"dense": replace(FAIRSEQ_MLP, width="ffn_dim")},
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norm=LAYER,
        final_norm="layer_norm",
        scaled_embedding="scale_embedding",
        dropout="dropout",
        embedding_dropout="dropout",
    ),
    "biogpt": Family(
        mixers={"full": replace(ATTENTION, prefix="self_attn.", o="out_proj", rotary=False)},
        feeds={"dense": FAIRSEQ_MLP},
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norm=LAYER,
        final_norm="layer_norm",
        positions=lambda config: config.number("max_position_embeddings") + 2,
        scaled_embedding="scale_embedding",
        dropout="hidden_dropout_prob",
        embedding_dropout="hidden_dropout_prob",
    ),
}
