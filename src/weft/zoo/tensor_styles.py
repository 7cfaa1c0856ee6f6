"""What of a family's blocks weft's tensor parallelism leaves whole, and what else its traffic depends on.

The declarations of families say how a matrix would be cut; here is where the engine does not cut it. models/
tensor_finder decides that from a model's code; tests/unit/models/test_tensor_styles.py compares every family with it.
Whole in every family: what mixes tokens other than by softmax attention, and attention that training never uses.
"""

from __future__ import annotations

from dataclasses import replace

from weft.core.model_shape import AttentionShape, BlockShape, ExtraShape, LinearShape, MoeShape
from weft.zoo import tensor_exceptions as known
from weft.zoo.config import Config

# parts of blocks, by the beginning of their matrices' names, that stay whole; "" is all of them
WHOLE: dict[str, tuple[str, ...]] = {
    "axk2": ("self_attn.",),
    "cpmant": ("",),
    "dbrx": ("",),
    "deepseek_v4": ("self_attn.",),
    "diffllama": ("self_attn.",),
    "doge": ("self_attn.",),
    "gemma3n_text": ("",),
    "gpt_neox_japanese": ("attention.",),
    "gpt_oss": ("mlp.experts.",),
    "inkling_text": ("self_attn.",),
    "jetmoe": ("",),
    "kimi_linear": ("self_attn.",),
    "rwkv": ("",),
    "xlnet": ("",),
    "xlstm": ("mlstm_layer.",),
    "zamba": ("",),
    "zamba2": ("",),
    "zaya": ("self_attn.",),
}

# token tables and heads that stay whole; of the second, both do where they are tied: the head's bias is another's too
WHOLE_TABLES = frozenset(("cpmant", "inkling_text", "mllama_text_model", "moshi", "prophetnet"))
WHOLE_HEADS = frozenset(("prophetnet",))
WHOLE_WHERE_TIED = frozenset(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "ernie", "megatron-bert", "roberta"),
        *("roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)

# blocks that take or pass on more than one stream of hidden states: no sequence parallel
CROOKED = frozenset(known.NOT_STRAIGHT) | frozenset(
    (
        *("big_bird", "doge", "gemma4_text", "gemma4_unified_text", "glm_moe_dsa", "inkling_text", "llama4_text"),
        *("mllama_text_model", "rwkv", "xlnet", "xlstm", "xmod", "zamba", "zamba2", "zaya"),
    )
)

# norms of what the last part of a block gives, and families that scale it: recomputing comes to the sum before them
LAST_NORMS = frozenset(("post_feedforward_layernorm", "post_mlp_layernorm", "output.LayerNorm"))
SCALED_SUMS = frozenset(("doge",))

# routers whose weights reach the experts in float32, whatever the compute dtype
FLOAT32_WEIGHTS = frozenset(
    (
        *("afmoe", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "hy_v3", "minimax_m2", "mixtral", "nemotron_h"),
        *("solar_open",),
    )
)

# parameters of routers that are set by rules, not by gradients
FROZEN = {"afmoe": ("mlp.expert_bias",), "ernie4_5_moe": ("mlp.gate.moe_statics.e_score_correction_bias",)}

PER_HEAD = frozenset(("sinks", "gate_bias"))  # parameters of attention with a number for each head


def as_cut(block: BlockShape, config: Config) -> BlockShape:
    """`block` as it is cut: styles, and what recomputing and routing send."""
    linears = tuple(replace(one, style="replicated") if _is_whole(one, block, config) else one for one in block.linears)
    cut = replace(block, linears=linears)
    return replace(
        cut,
        extras=tuple(_extra(extra, cut, config.model_type) for extra in block.extras),
        ends_in_norm=config.model_type in SCALED_SUMS or any(norm.name in LAST_NORMS for norm in block.norms),
        attention=_dealt(block.attention, config),
        moe=_routed(block.moe, config.model_type),
    )


def has_sharded_table(config: Config, *, is_tied: bool) -> bool:
    model_type = config.model_type
    return model_type not in WHOLE_TABLES and not (is_tied and model_type in WHOLE_WHERE_TIED)


def has_sharded_head(config: Config, *, is_tied: bool) -> bool:
    model_type = config.model_type
    return model_type not in WHOLE_HEADS and not (is_tied and model_type in WHOLE_WHERE_TIED)


def _is_whole(linear: LinearShape, block: BlockShape, config: Config) -> bool:
    model_type = config.model_type
    if model_type in known.REPLICATED or linear.name.startswith(WHOLE.get(model_type, ())):
        return True
    match linear.role:
        case "attention":
            where = any(model_type == one and config.get(key) for one, key, _ in known.REPLICATED_ATTENTION_WHERE)
            is_softmax = block.attention is not None and linear.active > 0
            return not is_softmax or model_type in known.REPLICATED_ATTENTION or where
        case "expert":
            return model_type in known.REPLICATED_EXPERTS
        case role:
            return role == "other"


def _extra(extra: ExtraShape, block: BlockShape, model_type: str) -> ExtraShape:
    if extra.name in FROZEN.get(model_type, ()):
        return replace(extra, is_trained=False)
    if extra.name.rpartition(".")[2] not in PER_HEAD:
        return extra
    return replace(extra, style="column" if block.shards("attention") else "replicated")


def _dealt(attention: AttentionShape | None, config: Config) -> AttentionShape | None:
    orders = known.FUSED_QKV.get(config.model_type, ())
    order = next((order for flag, order in orders if not flag or config.get(flag, False)), "")
    return None if attention is None else replace(attention, has_grouped_order=order == "groups")


def _routed(moe: MoeShape | None, model_type: str) -> MoeShape | None:
    return None if moe is None else replace(moe, weighs_in_float32=model_type in FLOAT32_WEIGHTS)
