"""Saved activations of one block per kind, from a forward of the model on the meta device.

Every tensor that autograd saves inside a block is counted once per storage, by the axes that shard it:

| saved tensor                                            | component of `SavedBytes`                   |
| ------------------------------------------------------- | ------------------------------------------- |
| computed from a column-parallel linear                  | `split`; of keys and values `key_value`     |
| full, inside a region or a replicated mixer             | `gathered`; entering a second one: `copied` |
| of experts' inputs and outputs, full width              | `routed`                                    |
| elsewhere: the residual stream and its norms            | `stream`                                    |
| quadratic in the sequence                               | `scores`, or `unsharded_scores`             |

Two sequence lengths tell linear from quadratic tensors; constants are parameters' copies and are not counted. Only the
first block of each kind runs, the others return its output. Fused attention saves its operands, output and one float32
per head and query, as flash attention does. A last forward counts a block's calls of the attention interface, and the
key-value heads that they get: a config may have others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.core.model_shape import AttentionShape, BlockProfile, BlockShape, ModelShape, MoeShape, SavedBytes
from weft.models.cp.probe import replaced_attention
from weft.models.shape.fake import fused_attention, transformers_patches
from weft.models.shape.tracing import BlockRecord, SavedTensor, Tracer, install_hooks, is_stream
from weft.models.tp.layout import TensorLayout

MAX_LENGTH = 1024
DTYPES = (torch.bfloat16, torch.float32)


def profile_blocks(
    models: Mapping[bool, nn.Module], shape: ModelShape, tensors: TensorLayout, *, blocks: Sequence[str]
) -> tuple[BlockShape, ...]:
    """The kinds of `shape` with their profiles; `blocks` are the names of all blocks.

    `models`: the model whose attention writes its scores (True), and the one with fused attention where its family
    supports that (False). Both end in another dtype.
    """
    kinds = dict(zip(blocks, shape.order, strict=True))
    found: list[dict[tuple[int, bool], _BlockTrace]] = [{} for _ in shape.kinds]
    longest = min(MAX_LENGTH, shape.max_positions) if shape.max_positions > 0 else MAX_LENGTH
    lengths = (longest * 3 // 4, longest)  # both beyond a short window, where attention takes a mask
    for writes_scores, model in models.items():
        model.to("meta").eval()  # buffers, too; dropout is counted by rate
        for dtype in DTYPES:
            runs = _run(model, shape, tensors, kinds, dtype=dtype, lengths=lengths)
            for index, pair in enumerate(zip(*runs, strict=True)):
                found[index][dtype.itemsize, writes_scores] = _BlockTrace(short=pair[0], long=pair[1], lengths=lengths)
    called = _as_called(models[False], shape, tensors, kinds, length=lengths[0])
    return tuple(_profiled(kind, traces) for kind, traces in zip(called, found, strict=True))


def _profiled(kind: BlockShape, traces: dict[tuple[int, bool], _BlockTrace]) -> BlockShape:
    found = {key: trace.saved(kind) for key, trace in traces.items()}
    has_scores = _has_scores(found[2, False], kind)
    profiles = tuple(
        BlockProfile(
            compute_bytes=nbytes,
            writes_scores=writes,
            saved=_without_scores(saved) if has_scores and not writes else saved,
        )
        for (nbytes, writes), saved in found.items()
    )
    short = traces[2, False].short
    moe, attention = kind.moe, kind.attention
    return replace(
        kind,
        profiles=profiles,
        attention=replace(attention, materialises_scores=has_scores) if attention is not None else None,
        moe=_routed(moe, short) if moe is not None else None,
        is_parallel=short.is_parallel,
        saves_after_exit=short.saves_after_exit,
    )


def _routed(moe: MoeShape, block: BlockRecord) -> MoeShape:
    return replace(
        moe,
        weighs_in_float32=block.weighs_in_float32,
        num_weights=block.num_weights,
        num_choices=block.num_choices,
        saves_after_experts=block.saves_after_experts,
    )


def _has_scores(saved: SavedBytes, kind: BlockShape) -> bool:
    """Whether attention without a fused kernel wrote scores: more than the numbers of one mask for all heads."""
    per_key = saved.scores + saved.unsharded_scores
    return per_key > 2 and (kind.attention is None or per_key >= kind.attention.num_heads)


def _without_scores(saved: SavedBytes) -> SavedBytes:
    """Of attention that a kernel for every variant would fuse."""
    return replace(saved, scores=0.0, unsharded_scores=0.0)


# ---------------------------------------------------------------------------------------------------- running a model


def _run(
    model: nn.Module,
    shape: ModelShape,
    tensors: TensorLayout,
    kinds: dict[str, int],
    *,
    dtype: torch.dtype,
    lengths: Sequence[int],
) -> list[list[BlockRecord]]:
    """What the first block of each kind saves in forwards of these lengths."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    runs = []
    for length in lengths:
        run = _Forward(shape, tensors, Tracer(model))
        with ExitStack() as stack:
            for patch in (
                *transformers_patches(), mock.patch.object(F, "scaled_dot_product_attention", fused_attention)
            ):  # fmt: skip
                stack.enter_context(patch)
            for name, kind in kinds.items():
                block = model.get_submodule(name)
                stack.enter_context(
                    mock.patch.object(block, "forward", partial(run.forward, block, block.forward, name, kind))
                )
            stack.enter_context(run.tracer)
            model(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=False)
        runs.append([run.records[index] for index in range(len(shape.kinds))])
    return runs


@dataclass
class _Forward:
    """One forward of a model: the first block of each kind runs, the others return its output."""

    shape: ModelShape
    tensors: TensorLayout
    tracer: Tracer
    records: dict[int, BlockRecord] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def forward(self, block: nn.Module, forward: Any, name: str, kind: int, *args: Any, **kwargs: Any) -> Any:
        if kind in self.outputs:
            return self.outputs[kind]
        hidden_size = self.shape.hidden_size
        stream = [one for one in tree_leaves((args, kwargs)) if is_stream(one, hidden_size)]
        record = self.records[kind] = BlockRecord(hidden_size=hidden_size)
        with (
            self.tracer.recording(stream),
            install_hooks(block, name, self.shape.kinds[kind], self.tensors, self.tracer, record),
            torch.autograd.graph.saved_tensors_hooks(partial(self.tracer.save, record), lambda one: one),
        ):
            self.outputs[kind] = forward(*args, **kwargs)
        return self.outputs[kind]


def _as_called(
    model: nn.Module, shape: ModelShape, tensors: TensorLayout, kinds: dict[str, int], *, length: int
) -> list[BlockShape]:
    """The kinds of `shape` with what their attention functions get. The model is of no use afterwards."""
    homes = {id(module): kind for name, kind in kinds.items() for module in model.get_submodule(name).modules()}
    heads: dict[int, list[int]] = {}

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> Any:
        if id(module) in homes:
            heads.setdefault(homes[id(module)], []).append(key.shape[1])
        return query.new_empty(*query.transpose(1, 2).shape[:3], value.shape[-1]), None

    with torch.no_grad(), replaced_attention(model, attend, masks="sdpa"):
        _run(model, shape, tensors, kinds, dtype=DTYPES[0], lengths=(length,))
    return [_with_calls(kind, heads.get(index, [])) for index, kind in enumerate(shape.kinds)]


def _with_calls(kind: BlockShape, kv_heads: Sequence[int]) -> BlockShape:
    """`kv_heads` of each call; none where attention is not behind the interface."""
    if kind.attention is None or not kv_heads:
        return kind
    return replace(kind, attention=replace(kind.attention, num_kv_heads=kv_heads[0], calls=len(kv_heads)))


# ------------------------------------------------------------------------------------------------- bytes by component


@dataclass(frozen=True, kw_only=True)
class _BlockTrace:
    """The records of two sequence lengths."""

    short: BlockRecord
    long: BlockRecord
    lengths: tuple[int, int]

    def saved(self, kind: BlockShape) -> SavedBytes:
        short, long = (list(record.saved.values()) for record in (self.short, self.long))
        if len(short) != len(long):  # a loop over chunks of the sequence
            short, long = _summed(short, like=long), _summed(long, like=short)
        total = SavedBytes()
        for one, other in zip(short, long, strict=True):
            linear, quadratic = _growth(one.nbytes, other.nbytes, self.lengths)
            total = total + _component(one, linear, quadratic, kind.attention, self.lengths[0])
        return total


def _summed(saved: list[SavedTensor], *, like: list[SavedTensor]) -> list[SavedTensor]:
    """One entry for all tensors of a component, for each component that either list has."""
    found = []
    for kind in dict.fromkeys(one.component for one in (*saved, *like)):
        own = [one for one in saved if one.component == kind]
        nbytes, elements = (sum(getattr(one, name) for one in own) for name in ("nbytes", "elements"))
        found.append(
            replace((own or [one for one in like if one.component == kind])[0], nbytes=nbytes, elements=elements)
        )
    return sorted(found, key=lambda one: str(one.component))


def _growth(short: int, long: int, lengths: tuple[int, int]) -> tuple[float, float]:
    """(bytes per token, bytes per token and key) from bytes at two lengths; 0 for constants."""
    if short == long:
        return 0.0, 0.0
    first, second = short / lengths[0], long / lengths[1]
    quadratic = (second - first) / (lengths[1] - lengths[0])
    if abs(quadratic) * lengths[0] < 1e-3 * first:
        return first, 0.0
    return max(0.0, first - quadratic * lengths[0]), max(0.0, quadratic)


def _component(
    saved: SavedTensor, linear: float, quadratic: float, attention: AttentionShape | None, length: int
) -> SavedBytes:
    scopes = {scope for scope in saved.scopes if scope}
    if saved.spread == "full":
        if quadratic:
            return SavedBytes(unsharded_scores=quadratic, gathered=linear)
        if saved.is_routed:
            return SavedBytes(routed=linear)
        if not scopes:
            return SavedBytes(stream=linear)
        return SavedBytes(gathered=linear, copied=linear * (len(scopes) - 1))
    found = SavedBytes(scores=quadratic)
    if attention is None or attention.num_kv_heads == attention.num_heads or saved.spread == "split":
        return found + SavedBytes(split=linear)
    width = attention.num_kv_heads * attention.head_dim
    if saved.spread == "fused" and saved.is_fused_output:
        query = attention.num_heads * attention.head_dim
        share = query / (query + 2 * width)
        return found + SavedBytes(split=linear * share, key_value=linear * (1 - share))
    is_key_value = saved.elements / length <= width
    return found + (SavedBytes(key_value=linear) if is_key_value else SavedBytes(split=linear))
