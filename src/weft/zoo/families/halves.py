"""Decoders that are half of an encoder-decoder (BART, Pegasus, Whisper) and encoders used as decoders (BERT, RoBERTa).

Not decoder-only models. Cross-attention exists and is counted; without an encoder it is not used, so it costs no FLOPs.
The learned tables around the blocks (positions, segments, the head's transform) are most of what differs.
"""

from __future__ import annotations

from weft.zoo.attention import Attention
from weft.zoo.config import Config, Size
from weft.zoo.declared import replace
from weft.zoo.families.dense import split_dim
from weft.zoo.family import Family, Layer
from weft.zoo.feedforward import Mlp
from weft.zoo.parts import LAYER, Several


def decoder_layers(config: Config) -> list[Layer]:
    return [Layer()] * config.count("decoder_layers")


def decoder_dim(config: Config) -> int:
    return config.hidden // config.number("decoder_attention_heads")


def positions(offset: int, *, key: str = "max_position_embeddings") -> Size:
    return lambda config: config.number(key) + offset


def norm(config: Config) -> int:
    return 2 * config.hidden


def crossed(own: Attention, *, cross: str = "encoder_attn.") -> Several:
    return Several(pieces=(own, replace(own, prefix=cross, is_idle=True)))


HALF = Attention(
    o="out_proj", bias=True, heads="decoder_attention_heads", kv_heads="decoder_attention_heads", head_dim=decoder_dim,
    rotary=False,
)  # fmt: skip
BART = Family(
    mixers={"full": crossed(HALF)},
    feeds={"dense": Mlp(prefix="", gate="", up="fc1", down="fc2", bias=True, width="decoder_ffn_dim")},
    pattern=decoder_layers,
    norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    norm=LAYER,
    final_norm="",
    outside=(("layernorm_embedding", norm),),
    positions=positions(2),
    scaled_embedding="scale_embedding",
    dropout="dropout",
    embedding_dropout="dropout",
)
PEGASUS = replace(BART, positions=positions(0), outside=(), final_norm="layer_norm")
WITHOUT_SDPA = {"full": crossed(replace(HALF, materialises=True))}

BERT_ATTENTION = Attention(
    prefix="attention.", q="self.query", k="self.key", v="self.value", o="output.dense", bias=True,
    kv_heads="num_attention_heads", head_dim=split_dim, rotary=False,
)  # fmt: skip
SEGMENTS: tuple[str, Size] = ("token_type_embeddings", lambda config: config.number("type_vocab_size") * config.hidden)
EMBEDDING_NORM: tuple[str, Size] = ("embeddings.LayerNorm", norm)
TRANSFORM: tuple[str, Size] = ("head.transform", lambda config: config.hidden * (config.hidden + 3))
SECOND_BIAS: tuple[str, Size] = (  # an untied decoder keeps a bias beside the head's own
    "head.decoder.bias", lambda config: config.number("vocab_size") * (not config.flag("tie_word_embeddings"))
)  # fmt: skip
SECOND_TABLE: tuple[str, Size] = (  # untied, the decoder has a table of its own beside the model's
    "decoder.word_embeddings",
    lambda config: config.number("vocab_size") * config.hidden * (not config.flag("tie_word_embeddings")),
)
BERT = Family(
    mixers={"full": BERT_ATTENTION},
    feeds={"dense": Mlp(prefix="", gate="", up="intermediate.dense", down="output.dense", bias=True)},
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    norm=LAYER,
    final_norm="",
    positions="max_position_embeddings",
    outside=(SEGMENTS, EMBEDDING_NORM, TRANSFORM, SECOND_BIAS),
    head_bias=True,
    dropout="hidden_dropout_prob",
    embedding_dropout="hidden_dropout_prob",
)


def electra_width(config: Config) -> int:
    return int(config.get("embedding_size", config.hidden))


def electra_outside(config: Config) -> int:
    """Tables and norms of the embedding width, the projection up, and the head's transform down."""
    width, rows = electra_width(config), config.number("max_position_embeddings") + config.number("type_vocab_size")
    up = 0 if width == config.hidden else (width + 1) * config.hidden
    return rows * width + 2 * width + up + (config.hidden + 1) * width + 2 * width


def rembert_outside(config: Config) -> int:
    """Input width and output width both differ from the hidden size, so the head is counted here."""
    width, out = config.number("input_embedding_size"), config.number("output_embedding_size")
    rows = config.number("max_position_embeddings") + config.number("type_vocab_size")
    head = (out + 1) * config.number("vocab_size") + 2 * out
    return rows * width + 2 * width + (width + 1) * config.hidden + (config.hidden + 1) * out + head


def roc_bert_outside(config: Config) -> int:
    """Pronunciation and shape tables beside the words, mapped to the hidden size together."""
    sound, shape = config.number("pronunciation_embed_dim"), config.number("shape_embed_dim")
    tables = config.number("pronunciation_vocab_size") * sound * config.flag("enable_pronunciation")
    tables += config.number("shape_vocab_size") * shape * config.flag("enable_shape")
    if not config.flag("concat_input"):
        return tables
    width = config.hidden + sound * config.flag("enable_pronunciation") + shape * config.flag("enable_shape")
    return tables + (width + 1) * config.hidden


def adapter(config: Config) -> int:
    """X-MOD: two matrices with biases for each language, through a narrower width."""
    width = config.hidden // int(config.get("adapter_reduction_factor", 2))
    languages = config.get("languages") or ("en_XX",)
    return len(languages) * (2 * width * config.hidden + width + config.hidden)


FAMILIES: dict[str, Family] = {
    "bart": BART,
    "plbart": BART,
    "mvp": replace(BART, mixers=WITHOUT_SDPA),
    "blenderbot-small": replace(BART, positions=positions(0)),
    "marian": replace(BART, positions=positions(0), outside=()),
    "pegasus": PEGASUS,
    "blenderbot": PEGASUS,
    "mbart": replace(BART, final_norm="layer_norm"),
    "bigbird_pegasus": replace(
        BART,
        mixers={"full": crossed(replace(HALF, bias="use_bias", materialises=True))},
        positions=positions(0),
        tied=False,
    ),
    "trocr": replace(BART, mixers=WITHOUT_SDPA, vocab="vocab_size"),
    "whisper": replace(
        BART,
        mixers={"full": crossed(replace(HALF, k_bias=False))},
        positions=positions(0, key="max_target_positions"),
        outside=(),
        final_norm="layer_norm",
    ),
    "prophetnet": replace(
        BART,
        mixers={
            "full": Several(
                pieces=(
                    prophet := replace(
                        HALF,
                        q="query_proj",
                        k="key_proj",
                        v="value_proj",
                        materialises=True,
                        heads="num_decoder_attention_heads",
                        kv_heads="num_decoder_attention_heads",
                        head_dim=lambda config: config.hidden // config.number("num_decoder_attention_heads"),
                    ),
                    replace(prophet, prefix="cross_attn.", is_idle=True),
                )
            )
        },
        feeds={
            "dense": Mlp(
                prefix="feed_forward.", gate="", up="intermediate", down="output", bias=True, width="decoder_ffn_dim"
            )
        },
        pattern=lambda config: [Layer()] * config.count("num_decoder_layers"),
        norms=("self_attn_layer_norm", "cross_attn_layer_norm", "feed_forward_layer_norm"),
        extras=(
            (
                "self_attn.relative_pos_embeddings",
                lambda config: (
                    (config.hidden + 1) * config.number("num_buckets") * config.number("num_decoder_attention_heads")
                ),
            ),
        ),
        positions=positions(0),
        outside=(
            ("ngram_embeddings", lambda config: config.number("ngram") * config.hidden),
            EMBEDDING_NORM,
            SECOND_TABLE,
        ),
    ),
    "bert": BERT,
    "ernie": replace(
        BERT,
        outside=(
            SEGMENTS,
            EMBEDDING_NORM,
            TRANSFORM,
            SECOND_BIAS,
            (
                "task_type_embeddings",
                lambda config: config.flag("use_task_id") * int(config.get("task_type_vocab_size", 3)) * config.hidden,
            ),
        ),
    ),
    "roberta": BERT,
    "camembert": BERT,
    "xlm-roberta": BERT,
    "data2vec-text": BERT,
    "big_bird": replace(
        BERT,
        mixers={"full": replace(BERT_ATTENTION, bias="use_bias", out_bias=True, materialises=True)},
        outside=(
            SEGMENTS,
            EMBEDDING_NORM,
            TRANSFORM,
            SECOND_BIAS,
            ("pooler", lambda config: config.hidden * (config.hidden + 1)),
        ),
    ),
    "bert-generation": replace(BERT, outside=(EMBEDDING_NORM, SECOND_BIAS)),
    "megatron-bert": replace(
        BERT,
        mixers={"full": replace(BERT_ATTENTION, materialises=True)},
        norms=("attention.ln", "ln"),
        outside=(SEGMENTS, TRANSFORM, SECOND_BIAS),
        final_norm="ln",
    ),
    "roberta-prelayernorm": replace(
        BERT, norms=("attention.LayerNorm", "intermediate.LayerNorm"), final_norm="LayerNorm"
    ),
    "xlm-roberta-xl": replace(
        BERT,
        norms=("attention.self_attn_layer_norm", "LayerNorm"),
        outside=(SEGMENTS, TRANSFORM, SECOND_BIAS),
        final_norm="LayerNorm",
    ),
    "roformer": replace(
        BERT,
        mixers={"full": replace(BERT_ATTENTION, materialises=True, rotary=True)},
        positions=0,
        outside=(
            SEGMENTS,
            EMBEDDING_NORM,
            TRANSFORM,
            SECOND_BIAS,
            ("embed_positions", lambda config: config.number("max_position_embeddings") * split_dim(config)),
        ),
    ),
    "electra": replace(
        BERT, embedding_size=electra_width, positions=0, outside=(("embeddings and head", electra_outside),)
    ),
    "rembert": replace(
        BERT,
        mixers={"full": replace(BERT_ATTENTION, materialises=True)},
        embedding_size="input_embedding_size",
        positions=0,
        outside=(("embeddings and head", rembert_outside),),
        tied=True,
        head_bias=False,
    ),
    "roc_bert": replace(
        BERT, outside=(SEGMENTS, EMBEDDING_NORM, TRANSFORM, SECOND_BIAS, ("sound and shape", roc_bert_outside))
    ),
    "xmod": replace(
        BERT,
        extras=(
            ("output.adapter_modules.**", adapter),
            ("output.adapter_layer_norm.**", lambda config: 2 * config.hidden * config.flag("adapter_layer_norm")),
        ),
    ),
}
