"""`Family`: how the models of one type are put together, as a value; `build_shape` makes a `ModelShape` of it.

Not the families themselves (see families/). A layer is named by (mixer, feed): both are among the family's pieces,
and layers with the same names and overrides are one block kind. Parameters = sum over layers + what is outside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.core.errors import ModelError
from weft.core.model_shape import BlockShape, ExtraShape, ModelShape, NormShape
from weft.zoo.config import Config, Flag, Size
from weft.zoo.declared import Declared
from weft.zoo.parts import RMS, Norm, Parts, Piece, joined
from weft.zoo.tensor_grids import COMPARED_ON_GRIDS
from weft.zoo.tensor_styles import CROOKED, as_cut, has_sharded_head, has_sharded_table


class Layer(NamedTuple):
    """One layer: names of its pieces, and config values that are its own."""

    mixer: str = "full"
    feed: str = "dense"
    own: tuple[tuple[str, Any], ...] = ()


Pattern = Callable[[Config], list[Layer]]
NormName = str | tuple[str, Flag]  # with a flag: only where it holds


def uniform(config: Config) -> list[Layer]:
    return [Layer()] * config.layers


class Family(Declared):
    """`mixers` and `feeds` are the pieces a layer may have; `norms` are those of every layer."""

    mixers: Mapping[str, Piece]
    feeds: Mapping[str, Piece]
    pattern: Pattern = uniform
    norms: tuple[NormName, ...] = ("input_layernorm", "post_attention_layernorm")
    own_norms: Mapping[str, tuple[NormName, ...]] = MappingProxyType({})  # of a mixer or feed, in place of `norms`
    norm: Norm = RMS
    extras: tuple[tuple[str, Size], ...] = ()  # other parameters of every layer
    is_transposed: bool = False  # linears are stored [in, out], as GPT-2's
    is_parallel: Flag = False
    dropout: str = ""  # config key of the dropout on the residual stream
    # outside the blocks
    final_norm: str = "norm"  # "" for none
    final: Norm | None = None  # None: as norm
    positions: Size = 0  # rows of a learned position table
    outside: tuple[tuple[str, Size], ...] = ()
    embedding_size: Size = 0
    head_bias: Flag = False
    tied: Flag = "tie_word_embeddings"
    vocab: Size = "vocab_size"
    scaled_embedding: Flag = False
    embedding_dropout: str = ""
    notes: tuple[str, ...] = ()
    is_exact: bool = True


def build_shape(family: Family, config: Config, *, name: str) -> ModelShape:
    layers = family.pattern(config)
    unique = list(dict.fromkeys(layers))
    kinds = _named_apart([build_block(family, config, layer) for layer in unique])
    index = {layer: position for position, layer in enumerate(unique)}
    return ModelShape(
        name=name or config.model_type,
        model_type=config.model_type,
        hidden_size=config.hidden,
        vocab_size=config.sized(family.vocab),
        kinds=tuple(kinds),
        order=tuple(index[layer] for layer in layers),
        tied_head=config.flag(family.tied),
        max_positions=int(config.get("max_position_embeddings", 0)),
        embedding_size=config.sized(family.embedding_size),
        head_bias=config.flag(family.head_bias),
        has_sharded_table=has_sharded_table(config, is_tied=config.flag(family.tied)),
        has_sharded_head=has_sharded_head(config, is_tied=config.flag(family.tied)),
        has_grids=config.model_type in COMPARED_ON_GRIDS,
        has_straight_stream=config.model_type not in CROOKED,
        scaled_embedding=config.flag(family.scaled_embedding),
        final_norm=(family.final or family.norm).kind,
        outside=_outside(family, config),
        caps_logits=bool(config.get("final_logit_softcapping", None)),
        dropout=config.rate(family.embedding_dropout),
        is_exact=family.is_exact,
        notes=family.notes,
    )


def build_block(family: Family, config: Config, layer: Layer) -> BlockShape:
    own = config.given(**dict(layer.own)) if layer.own else config
    parts = joined((_parts(family.mixers, layer.mixer, own), _parts(family.feeds, layer.feed, own)))
    norms = tuple(family.norm.shape(own, norm, "hidden_size") for norm in _norm_names(family, own, layer))
    extras = tuple(ExtraShape(name=key, num_parameters=own.sized(size)) for key, size in family.extras)
    attention = parts.attention
    if attention is not None:
        attention = replace(
            attention,
            caps_scores=bool(own.get("attn_logit_softcapping", None)),
            copies_output=config.model_type in PARTLY_ROTATED,
        )
    block = BlockShape(
        kind=_kind(layer),
        linears=tuple(replace(linear, is_transposed=family.is_transposed) for linear in parts.linears if linear.copies),
        norms=tuple(_as_computed(norm, config.model_type) for norm in (*norms, *parts.norms)),
        extras=tuple(extra for extra in (*parts.extras, *extras) if extra.num_parameters),
        attention=attention,
        moe=parts.moe,
        mlp_width=parts.mlp_width,
        is_gated=parts.is_gated,
        activation=parts.activation or "silu",
        is_parallel=own.flag(family.is_parallel),
        dropout=own.rate(family.dropout),
    )
    return as_cut(block, own)


# How norms are written out in transformers 5.22, where not as most: (float32, compute) tensors kept for the backward.
# An RMSNorm keeps (1, 1), but (2, 0) where it multiplies by its weight before it casts back; a LayerNorm (0, 1).
_WEIGHTED_IN_FLOAT32 = (
    *("afmoe", "flex_olmo", "gpt_oss", "olmo2", "olmo3", "qwen3_next"),
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "recurrent_gemma", "vaultgemma"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
NORM_KEEPS = {
    **{("rms", model_type): (2, 0) for model_type in _WEIGHTED_IN_FLOAT32},
    ("layer", "olmo"): (1, 0),
    ("layer", "cohere"): (3, 0),
    ("layer", "cohere2"): (3, 0),
}
# Rotary embedding of part of a head is put together again by a concatenation, which changes the order in memory.
PARTLY_ROTATED = frozenset(
    (
        *("gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "phi", "phi3", "phimoe", "stablelm", "persimmon", "fuyu"),
        *("glm", "glm4", "glm4_moe", "nemotron", "recurrent_gemma", "minimax_m2", "qwen3_next", "bamba", "zaya"),
        *("laguna", "phi4_multimodal", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    )
)


def _as_computed(norm: NormShape, model_type: str) -> NormShape:
    return replace(norm, saved_tensors=NORM_KEEPS.get((norm.kind, model_type)))


def _parts(pieces: Mapping[str, Piece], name: str, config: Config) -> Parts:
    if not name:
        return Parts()
    if name not in pieces:
        raise ModelError(
            f"{name!r} is no kind of layer of {config.model_type!r} models",
            hint=f"the layers its config may list are of {', '.join(pieces)}",
        )
    return pieces[name].parts(config)


def _norm_names(family: Family, config: Config, layer: Layer) -> list[str]:
    named = family.own_norms.get(layer.mixer, family.own_norms.get(layer.feed, family.norms))
    pairs = [(entry, True) if isinstance(entry, str) else (entry[0], config.flag(entry[1])) for entry in named]
    return [name for name, is_there in pairs if is_there]


def _kind(layer: Layer) -> str:
    """The dense block of plain attention is "dense"; others are named by what makes them different."""
    if layer.mixer in ("", "full"):
        return layer.feed or "attention"
    return layer.mixer if layer.feed in ("", "dense") else f"{layer.mixer}_{layer.feed}"


def _named_apart(blocks: list[BlockShape]) -> list[BlockShape]:
    """Two kinds of one name (layers with sizes of their own) get numbers, so that reports can tell them apart."""
    seen: dict[str, int] = {}
    for block in blocks:
        seen[block.kind] = seen.get(block.kind, 0) + 1
    counted: dict[str, int] = {}
    result = []
    for block in blocks:
        counted[block.kind] = counted.get(block.kind, 0) + 1
        is_alone = seen[block.kind] == 1
        result.append(block if is_alone else replace(block, kind=f"{block.kind}_{counted[block.kind]}"))
    return result


def _outside(family: Family, config: Config) -> tuple[ExtraShape, ...]:
    found = [ExtraShape(name=key, num_parameters=config.sized(size)) for key, size in family.outside]
    rows = config.sized(family.positions)
    if rows:
        found.append(ExtraShape(name="positions", num_parameters=rows * config.hidden, row_size=config.hidden))
    if family.final_norm:
        norm = (family.final or family.norm).shape(config, family.final_norm, "hidden_size")
        tensors = max(1, norm.num_parameters // norm.size)
        found.append(ExtraShape(name=family.final_norm, num_parameters=norm.num_parameters, num_tensors=tensors))
    return tuple(extra for extra in found if extra.num_parameters)
