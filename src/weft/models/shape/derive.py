"""`derive_shape`: the sizes of a causal LM, read from its modules on the meta device.

    blocks, ties        models.layout.describe
    sharded matrices    models.tp.finder: the regions that the engine shards
    matrices, norms     every parameter of a block, once
    saved activations   a forward of one block per kind on the meta device (`profile`)

So the planner's parameters are the model's and its shards the engine's, for every family that transformers builds.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.core.adapter_spec import AdapterSpec
from weft.core.model_shape import BlockShape, ExtraShape, ModelShape
from weft.models.adapter.lora import adapted_linears, insert_adapter, rests_low
from weft.models.build import build_on_meta
from weft.models.ep.finder import find_expert_layout
from weft.models.hf_config import sentence
from weft.models.layout import ModelLayout, describe, find_blocks
from weft.models.scalar_head import has_scalar_head, mark_scalar
from weft.models.shape.block import BlockReader, is_layer_norm
from weft.models.shape.profile import profile_blocks
from weft.models.tp.finder import blocks_of_text, find_tensor_layout, text_config, text_tower
from weft.models.tp.layout import TensorLayout
from weft.models.tp.roles import looks_like_norm
from weft.models.tp.vocabulary import called
from weft.zoo.tensor_grids import COMPARED_ON_GRIDS


def derive_shape(config: Any, *, name: str = "", adapter: AdapterSpec | None = None) -> ModelShape:
    """The shape of the causal LM that transformers builds from `config`, with adapters and profiles of its blocks."""
    if has_scalar_head(config):
        mark_scalar(config := copy.deepcopy(config))
    # a model keeps its attention kernel in its config
    models = {writes: build_on_meta(copy.deepcopy(config), attention=kernel) for writes, kernel in _KERNELS.items()}
    for model in models.values():
        insert_adapter(model, adapter or AdapterSpec())
    shape = shape_of_model(models[False], name=name)
    tensors = find_tensor_layout(models[False], describe(models[False]))
    try:
        return replace(shape, kinds=profile_blocks(models, shape, tensors, blocks=block_names(models[False])))
    except Exception as error:  # modelling code that reads values, which meta tensors have not
        note = f"activations are estimated: its blocks cannot be profiled on the meta device ({sentence(error)})"
        return replace(shape, notes=(*shape.notes, note))


_BEFORE_BLOCKS = re.compile(r"embed|position|project_in|per_layer")
_KERNELS = {False: "sdpa", True: "eager"}


def shape_of_model(model: nn.Module, *, name: str = "") -> ModelShape:
    """The shape of `model`, whose parameters may be on the meta device, without profiles."""
    layout, config = describe(model), text_config(model)
    tensors = find_tensor_layout(model, layout)
    blocks = block_names(model)
    reader = BlockReader(model, tensors, config)
    kinds, order = _kinds([reader.read(block) for block in blocks])
    shape = _with_ends(model, layout, tensors, config, kinds=kinds, order=order, blocks=blocks, name=name)
    return replace(shape, whole_experts=find_expert_layout(model).why_not_divided) if shape.expert_layers else shape


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Blocks of the text, with those that share weights: they are units of the root, but blocks of the model."""
    layout = describe(model)
    lists = {block.rpartition(".")[0] for block in layout.blocks}
    found = [block for block in find_blocks(model) if block in layout.blocks or block.rpartition(".")[0] in lists]
    return blocks_of_text(found, text_tower(model, layout.blocks))


def _kinds(read: Sequence[BlockShape]) -> tuple[tuple[BlockShape, ...], tuple[int, ...]]:
    """(distinct blocks with distinct names, the kind of each block)."""
    unique = list(dict.fromkeys(read))
    order = tuple(unique.index(block) for block in read)
    words = [block.kind for block in unique]
    numbered = [
        replace(block, kind=f"{block.kind}_{words[:index].count(block.kind) + 1}")
        if words.count(block.kind) > 1
        else block
        for index, block in enumerate(unique)
    ]
    return tuple(numbered), order


def _with_ends(
    model: nn.Module,
    layout: ModelLayout,
    tensors: TensorLayout,
    config: Any,
    *,
    kinds: tuple[BlockShape, ...],
    order: tuple[int, ...],
    blocks: tuple[str, ...],
    name: str,
) -> ModelShape:
    """The shape with what is outside its blocks: token table, head, all other parameters."""
    table, head = called(model, "get_input_embeddings"), called(model, "get_output_embeddings")
    table_weight, head_weight = getattr(table, "weight", None), getattr(head, "weight", None)
    is_tied = table_weight is head_weight or head_weight is None
    head_bias = getattr(head, "bias", None)
    known = {id(one) for one in (table_weight, head_weight, head_bias) if one is not None}
    width = table_weight.shape[1] if table_weight is not None else tensors.hidden_size
    has_scores = has_scalar_head(getattr(model, "config", None))
    ends = [one.shape[0] for one in (table_weight if has_scores else head_weight, table_weight) if one is not None]
    vocabulary = ends[0] if ends else 0
    shape = ModelShape(
        name=name or model_type_of(model),
        model_type=model_type_of(model),
        hidden_size=tensors.hidden_size or width,
        vocab_size=vocabulary,
        kinds=kinds,
        order=order,
        tied_head=is_tied,
        max_positions=_number(config, "max_position_embeddings"),
        embedding_size=0 if width == tensors.hidden_size else width,
        head_bias=head_bias is not None,
        has_sharded_table=tensors.embedding is not None,
        has_sharded_head=tensors.head is not None and not has_scores,
        has_grids="grid" not in tensors.refusals and str(getattr(config, "model_type", "")) in COMPARED_ON_GRIDS,
        has_straight_stream="sequence_parallel" not in tensors.refusals,
        caps_logits=bool(getattr(config, "final_logit_softcapping", None)),
        final_norm=_final_norm(model, layout),
        outside=_outside(model, set(blocks), known),
        dropout=_embedding_dropout(model, blocks),
        is_adapted=next(adapted_linears(model), None) is not None,
        has_low_base=rests_low(model),
        has_scores=has_scores,
        trains_ends=any(one is not None and one.requires_grad for one in (table_weight, head_weight)),
    )
    missing = sum(parameter.numel() for parameter in model.parameters()) - shape.num_parameters
    if missing:  # the table has rows beyond the vocabulary, or another width than the head
        extra = ExtraShape(name="rows beyond the vocabulary", num_parameters=missing, is_before_blocks=True)
        shape = replace(shape, outside=(*shape.outside, extra))
    return shape


def model_type_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _outside(model: nn.Module, blocks: set[str], known: set[int]) -> tuple[ExtraShape, ...]:
    """Parameters outside the blocks, by name."""
    found = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        is_inside = any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts)))
        if id(parameter) not in known and not is_inside and parameter.numel():
            owner = model.get_submodule(name.rpartition(".")[0])
            found.append(
                ExtraShape(
                    name=name,
                    num_parameters=parameter.numel(),
                    row_size=parameter.numel() // parameter.shape[0] if parameter.ndim else 1,
                    is_trained=parameter.requires_grad,
                    is_before_blocks=isinstance(owner, nn.Embedding) or _BEFORE_BLOCKS.search(name) is not None,
                )
            )
    return tuple(found)


def _final_norm(model: nn.Module, layout: ModelLayout) -> Any:
    """The kind of the last norm outside the blocks."""
    norms = [
        module
        for name, module in model.named_modules()
        if looks_like_norm(module) and not any(name.startswith(f"{block}.") for block in layout.blocks)
    ]
    return "layer" if norms and is_layer_norm(norms[-1]) else "rms"


def _embedding_dropout(model: nn.Module, blocks: tuple[str, ...]) -> float:
    rates = [
        module.p
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and not any(name.startswith(f"{block}.") for block in blocks)
    ]
    decoder = vars(model.get_submodule(text_tower(model, blocks))).get("dropout")
    return max([*rates, decoder] if isinstance(decoder, float) else rates, default=0.0)


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
