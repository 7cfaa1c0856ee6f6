"""Tensor parallelism on grids: layers around the linears, norms, embeddings and head of a sharded model.

    2d, 2.5d   hidden states have rows (d, i) and features j everywhere; every linear is SUMMA's
    3d         between regions rows (i, j), features k; inside rows (i, k), features j: column linears enter, row
               linears leave

A rank takes its rows of the batch, so attention is local: local rows, local heads. Logits have the local rows and chunk
j of the vocabulary; in 3d their rows, and so the labels', are (i, k). Selective recompute saves attention alone:
linears, with their collectives, run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.axes import TP
from weft.core.errors import NotBuiltError
from weft.core.plan import TensorParallel
from weft.core.shards import even_span
from weft.engine import collectives
from weft.engine.activations.dropout import uses_randomness
from weft.engine.mesh import Topology
from weft.engine.tp.activation_layout import ActivationLayout
from weft.engine.tp.apply import find_regions
from weft.engine.tp.context import TPContext
from weft.engine.tp.cross_entropy import VocabularyLoss
from weft.engine.tp.grid import Grid, build_grid
from weft.engine.tp.one_d import set_sizes
from weft.engine.tp.statistics import spanning
from weft.engine.tp_grid import cube, summa
from weft.engine.tp_grid.embedding import logits_span, token_table
from weft.engine.tp_grid.shards import grid_shards, position_tables, stream_axis
from weft.engine.weights.local_shards import shard_parameters
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout
from weft.models.tp.layout import LinearShards, TensorLayout


def apply_tensor_grid(
    model: nn.Module, layout: ModelLayout, policy: TensorParallel, topology: Topology, *, keep_logits_full: bool
) -> TPContext:
    """Shard `model` over a grid. `keep_logits_full`: a user's loss needs the full logits."""
    tensors = find_regions(model, layout)
    grid = build_grid(policy.mode, topology.group(TP), axis_ranks=topology.tp_rank_lists, owner=topology.groups)
    return apply_grid(model, layout, tensors, policy, grid=grid, keep_logits_full=keep_logits_full)


def apply_grid(
    model: nn.Module,
    layout: ModelLayout,
    tensors: TensorLayout,
    policy: TensorParallel,
    *,
    grid: Grid,
    keep_logits_full: bool,
) -> TPContext:
    """Shard the parameters of `model` and wrap its modules with the layers of `grid.mode`."""
    shards = grid_shards(model, layout, tensors, grid)
    _require_supported(model, tensors, grid, keep_logits_full=keep_logits_full)
    vocabulary = _vocabulary(model, tensors)
    has_positions = bool(position_tables(model, tensors))
    shard_parameters(model, layout, shards)
    is_loss_sharded = policy.loss_parallel and not keep_logits_full
    _wrap_modules(model, tensors, grid, vocabulary=vocabulary, gathers_logits=not is_loss_sharded)
    if grid.mode == "3d":
        wrap_forward(model, _RowInputs(grid, has_positions=has_positions))
    side, place = grid.sizes["i"], grid.place
    row_chunk = place["i"] * side + place["j"] if grid.mode == "3d" else place.get("d", 0) * side + place["i"]
    return TPContext(
        grid=grid,
        shards=shards,
        replicated_reasons={name: reason for name, reason in tensors.replicated.items() if not shards[name].is_sharded},
        activation_layout=_GridActivations(place=place["j"], degree=side, sequence_parallel=False),
        token_loss=_token_loss(grid, vocabulary) if is_loss_sharded else None,
        row_chunks=side * grid.sizes["k"] if grid.mode == "3d" else grid.sizes.get("d", 1) * side,
        row_chunk=row_chunk,
        label_chunk=place["i"] * side + place["k"] if grid.mode == "3d" else row_chunk,
        owns_loss=place["j"] == 0,
    )


@dataclass(kw_only=True)
class _GridActivations(ActivationLayout):
    """On a square every tensor is sharded in the same dimension: heads, or the last."""

    def shard_dim(self, shape: Sequence[int]) -> int | None:
        return 1 if len(shape) == 4 else len(shape) - 1


class _GridLinear:
    """A linear of a region: the grid's product replaces the module's."""

    def __init__(self, module: nn.Module, linear: LinearShards, grid: Grid) -> None:
        self.module, self.grid, self.is_transposed = module, grid, linear.is_transposed
        if grid.mode == "3d":
            self.product = cube.linear_pq if linear.side == "column" else cube.linear_qp
        else:
            self.product = summa.linear

    def __call__(self, _forward: Forward, x: Tensor) -> Tensor:
        module: Any = self.module
        return self.product(x, module.weight, module.bias, self.grid, is_transposed=self.is_transposed)


class _GridTable:
    """The token embedding, with the scale that some families apply to it."""

    def __init__(self, module: nn.Module, grid: Grid, vocabulary: int) -> None:
        self.module, self.grid, self.vocabulary = module, grid, vocabulary

    def __call__(self, _forward: Forward, ids: Tensor) -> Tensor:
        module: Any = self.module
        found = token_table(
            ids, module.weight, grid=self.grid, vocabulary=self.vocabulary, padding_idx=module.padding_idx
        )
        if type(module) is nn.Embedding:
            return found
        scale = module.embed_scale
        return found * (scale.to(found.dtype) if isinstance(scale, Tensor) else scale)


class _GridHead:
    """The output head; `gathers_logits` gathers the vocabulary's chunks, for losses that need the full logits."""

    def __init__(self, module: nn.Module, grid: Grid, vocabulary: int, *, gathers_logits: bool) -> None:
        self.module, self.grid, self.vocabulary, self.gathers_logits = module, grid, vocabulary, gathers_logits
        self.product = cube.head if grid.mode == "3d" else summa.head

    def __call__(self, _forward: Forward, x: Tensor) -> Tensor:
        module: Any = self.module
        logits = self.product(x, module.weight, module.bias, self.grid, vocabulary=self.vocabulary)
        if not self.gathers_logits:
            return logits
        chunk = _first_chunk(self.grid, self.vocabulary)
        padded = F.pad(logits, (0, chunk - logits.shape[-1]))
        return collectives.collect(padded, self.grid.group("j"), padded.ndim - 1)[..., : self.vocabulary]


class _RowInputs:
    """3d: ids have rows (i, j); attention has rows (i, k), and its positions and masks are gathered for those."""

    def __init__(self, grid: Grid, *, has_positions: bool) -> None:
        self.grid, self.has_positions = grid, has_positions

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        named = {
            key: self._of_attention(key, value) if isinstance(value, Tensor) and key != "input_ids" else value
            for key, value in kwargs.items()
        }
        return forward(*args, **named)

    def _of_attention(self, key: str, value: Tensor) -> Tensor:
        if key not in ("position_ids", "attention_mask") or value.ndim != 2 or self.has_positions:
            raise NotBuiltError(
                f"the model's input {key!r} cannot be sharded by rows in tensor_parallel.mode = '3d'",
                hint="use another tensor_parallel.mode, or data without it (data.isolate_documents = false)",
            )
        return collectives.gathered(value, self.grid.group("j"), 0).chunk(self.grid.sizes["k"])[self.grid.place["k"]]


def _wrap_modules(
    model: nn.Module, tensors: TensorLayout, grid: Grid, *, vocabulary: int, gathers_logits: bool
) -> None:
    for region in tensors.regions:
        for linear in region.linears:
            module = model.get_submodule(linear.name)
            wrap_forward(module, _GridLinear(module, linear, grid))
        for norm in region.wide_norms:
            module, width = model.get_submodule(norm.name), sum(segment.features for segment in norm.segments)
            wrap_forward(module, spanning(module, grid.group("j"), width))
        set_sizes(model.get_submodule(region.name), region, grid.sizes["j"])
    for name in tensors.norms:
        module = model.get_submodule(name)
        wrap_forward(module, spanning(module, grid.group(stream_axis(grid)), tensors.hidden_size))
    table, head = (model.get_submodule(name or "") for name in (tensors.embedding, tensors.head))
    wrap_forward(table, _GridTable(table, grid, vocabulary))
    wrap_forward(head, _GridHead(head, grid, vocabulary, gathers_logits=gathers_logits))


def _require_supported(model: nn.Module, tensors: TensorLayout, grid: Grid, *, keep_logits_full: bool) -> None:
    """Refuse features that grids do not support, beyond parameters that cannot be sharded."""
    table = model.get_submodule(tensors.embedding or "")
    if type(table) is not nn.Embedding and not hasattr(table, "embed_scale"):
        raise NotBuiltError(f"grids do not support the embedding class {type(table).__name__}", hint="use mode = '1d'")
    if grid.mode != "3d":
        return
    if uses_randomness(model):  # rows change between regions, and masks are drawn by row
        raise NotBuiltError(
            "dropout would draw other masks than other layouts in tensor_parallel.mode = '3d'",
            hint="set the model's dropout to 0 in [model.config], or use another mode",
        )
    if keep_logits_full:
        raise NotBuiltError(
            "a custom objective does not work with tensor_parallel.mode = '3d': logits have other rows than ids",
            hint="use another tensor_parallel.mode",
        )


def _vocabulary(model: nn.Module, tensors: TensorLayout) -> int:
    return model.get_parameter(f"{tensors.embedding}.weight").shape[0]


def _token_loss(grid: Grid, vocabulary: int) -> VocabularyLoss:
    return VocabularyLoss(first_token=logits_span(grid, vocabulary).begin, group=grid.group("j"))


def _first_chunk(grid: Grid, vocabulary: int) -> int:
    """Tokens of the largest chunk of logits."""
    if grid.mode != "3d":
        return even_span(vocabulary, degree=grid.sizes["j"], place=0).size
    return even_span(vocabulary, degree=grid.sizes["j"] ** 2, place=0).size * grid.sizes["j"]
