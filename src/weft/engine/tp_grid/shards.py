"""Local shards of parameters on the grids 2d, 2.5d and 3d: chunks of a rank, their copies, and gradient sums.

| parameter                                | 2d, 2.5d               | 3d                           | summed over     |
| ---------------------------------------- | ---------------------- | ---------------------------- | --------------- |
| weight of a column linear                | inputs i, outputs j    | inputs k, outputs j: i-th    | -, "d", -       |
| weight of a row linear                   | inputs i, outputs j    | inputs j, outputs k: i-th    | -, "d", -       |
| embedding, head                          | vocabulary i, hidden j | vocabulary j q + i, hidden k | -, "d", -       |
| stream: norms, row biases, positions     | hidden j               | hidden k                     | "i", "di", "ij" |
| region: column biases, sinks, head bias  | outputs j              | outputs j                    | "i", "di", "ik" |
| replicated, used inside a region         | replicated             | replicated                   | "tp"            |

"i-th": of the block's outputs this rank stores the i-th of q shards. Regions' outputs and inputs are sharded in units
of heads or columns. Any other parameter refuses the model: on a grid no module sees full hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from weft.core.errors import TensorParallelError
from weft.core.shards import LocalShard, Span, even_span, local_shard, replicated_shard
from weft.engine.tp.grid import TP_GROUP, Grid
from weft.engine.tp.one_d_shards import partition
from weft.engine.tp_grid.embedding import logits_span, table_span
from weft.models.layout import ModelLayout
from weft.models.tp.finder import text_config
from weft.models.tp.layout import LinearShards, Region, TensorLayout
from weft.zoo.tensor_grids import COMPARED_ON_GRIDS

Spans = dict[int, Sequence[Span]]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The number of ranks with the same chunk, and the group that sums its gradient."""

    copies: int
    over: str | None


WEIGHTS, STREAM, REGION = "weights", "stream", "region"


def stream_axis(grid: Grid) -> str:
    """The coordinate that shards the hidden features between regions. Inside a region it is j in every mode."""
    return "k" if grid.mode == "3d" else "j"


def grid_shards(model: nn.Module, layout: ModelLayout, tensors: TensorLayout, grid: Grid) -> dict[str, LocalShard]:
    """The local shard of every parameter, by canonical name."""
    require_grid(model, tensors, grid)
    sharded = {layout.ties.get(name, name): (spans, kind) for name, spans, kind in _sharded(model, tensors, grid)}
    partial = {name for region in tensors.regions for name in region.partial}
    shards = {}
    for name, parameter in model.named_parameters():
        if name in sharded:
            spans, kind = sharded[name]
            shared = _shared(grid, kind)
            shards[name] = local_shard(parameter.shape, spans, copies=shared.copies, summed_over=shared.over)
        elif name in partial:
            shards[name] = replicated_shard(parameter.shape, copies=grid.degree, summed_over=TP_GROUP)
        else:
            reason = tensors.replicated.get(name, "it is in no region")
            raise _not_on_grids(type(model).__name__, f"{name} cannot be sharded ({reason})")
    return shards


def require_grid(model: nn.Module, tensors: TensorLayout, grid: Grid) -> None:
    """Refuse sizes that the sides do not divide, and families with computation outside of regions."""
    name = type(model).__name__
    if "grid" in tensors.refusals:
        raise _not_on_grids(name, tensors.refusals["grid"])
    if tensors.embedding is None or tensors.head is None:
        raise _not_on_grids(name, "its embedding or its head stays replicated")
    model_type = str(getattr(text_config(model), "model_type", ""))
    if model_type not in COMPARED_ON_GRIDS:
        raise _not_on_grids(name, f"the family {model_type!r} was not compared with one process on grids")
    side, is_cube = grid.sizes["i"], grid.mode == "3d"
    for described, size in _sizes(tensors, is_cube=is_cube, side=side):
        if size % side:
            raise TensorParallelError(
                f"{described}, which a grid of side {side} does not divide",
                hint="use another mesh.tp, or tensor_parallel.mode = '1d'",
            )
    vocabulary, chunks = model.get_parameter(f"{tensors.embedding}.weight").shape[0], side**2 if is_cube else side
    if even_span(vocabulary, degree=chunks, place=chunks - 1).size == 0:
        raise TensorParallelError(
            f"a vocabulary of {vocabulary} is too small for {chunks} chunks", hint="use a smaller mesh.tp"
        )


def _sizes(tensors: TensorLayout, *, is_cube: bool, side: int) -> Iterator[tuple[str, int]]:
    """(description, size) of every size that a side must divide; the cube divides outputs twice."""
    hidden = tensors.hidden_size
    yield f"the hidden size is {hidden}", hidden
    if is_cube:
        yield f"a chunk of the hidden size is {hidden / side:g}", hidden // side
    for region in tensors.regions:
        for linear in region.linears:
            segments = linear.outputs if linear.side == "column" else linear.inputs
            for segment in segments:
                kind = "columns" if region.kind != "attention" else "key-value heads" if segment.may_repeat else "heads"
                yield f"{linear.name} has {segment.units} {kind}", segment.units
            if is_cube and linear.side == "column":
                features = sum(segment.features for segment in segments)
                yield f"a chunk of the outputs of {linear.name} is {features / side:g}", features // side


def _sharded(model: nn.Module, tensors: TensorLayout, grid: Grid) -> Iterator[tuple[str, Spans, str]]:
    """(parameter, spans by dimension, kind) of every sharded parameter."""
    for region in tensors.regions:
        yield from _sharded_in_region(model, region, grid)
    hidden = [_chunk(tensors.hidden_size, grid, stream_axis(grid))]
    for name in _stream_vectors(model, tensors):
        yield name, {model.get_parameter(name).ndim - 1: hidden}, STREAM
    for end in filter(None, (tensors.embedding, tensors.head)):
        vocabulary = model.get_parameter(f"{end}.weight").shape[0]
        yield f"{end}.weight", {0: [table_span(grid, vocabulary)], 1: hidden}, WEIGHTS
        if getattr(model.get_submodule(end), "bias", None) is not None:
            yield f"{end}.bias", {0: [logits_span(grid, vocabulary)]}, REGION


def _sharded_in_region(model: nn.Module, region: Region, grid: Grid) -> Iterator[tuple[str, Spans, str]]:
    side, place = grid.sizes["j"], grid.place["j"]
    for linear in region.linears:
        inputs, outputs = _column(linear, grid) if linear.side == "column" else _row(linear, grid)
        stored = _ith_shard(outputs, grid) if grid.mode == "3d" else outputs
        dims = (1, 0) if linear.is_transposed else (0, 1)
        yield f"{linear.name}.weight", dict(zip(dims, (stored, inputs), strict=True)), WEIGHTS
        if getattr(model.get_submodule(linear.name), "bias", None) is not None:
            yield f"{linear.name}.bias", {0: outputs}, REGION if linear.side == "column" else STREAM
    for tensor in region.tensors:
        yield tensor.name, {tensor.dim: partition(tensor.segments, degree=side, place=place)}, REGION
    for norm in region.wide_norms:
        for key, _ in model.get_submodule(norm.name).named_parameters(recurse=False):
            yield f"{norm.name}.{key}", {0: partition(norm.segments, degree=side, place=place)}, REGION


def _column(linear: LinearShards, grid: Grid) -> tuple[list[Span], list[Span]]:
    """Inputs and outputs of the block that this rank, or its group along i, holds."""
    inputs = _chunk(sum(one.features for one in linear.inputs), grid, "k" if grid.mode == "3d" else "i")
    return [inputs], partition(linear.outputs, degree=grid.sizes["j"], place=grid.place["j"])


def _row(linear: LinearShards, grid: Grid) -> tuple[list[Span], list[Span]]:
    place = grid.place["j" if grid.mode == "3d" else "i"]
    outputs = _chunk(sum(one.features for one in linear.outputs), grid, stream_axis(grid))
    return partition(linear.inputs, degree=grid.sizes["i"], place=place), [outputs]


def _ith_shard(spans: Iterable[Span], grid: Grid) -> list[Span]:
    """The i-th of q equal shards of concatenated spans; a shard may begin and end inside a span."""
    spans = list(spans)
    size = sum(span.size for span in spans) // grid.sizes["i"]
    begin = grid.place["i"] * size
    own, at = [], 0
    for span in spans:
        first, last = max(begin, at), min(begin + size, at + span.size)
        if last > first:
            own.append(Span(begin=span.begin + first - at, size=last - first, copies=span.copies))
        at += span.size
    return own


def _chunk(size: int, grid: Grid, axis: str) -> Span:
    own = size // grid.sizes[axis]
    return Span(begin=grid.place[axis] * own, size=own)


def _stream_vectors(model: nn.Module, tensors: TensorLayout) -> Iterator[str]:
    """Parameters of the residual stream's norms, and position embeddings: their last dimension is hidden."""
    for name in tensors.norms:
        for key, _ in model.get_submodule(name).named_parameters(recurse=False):
            yield f"{name}.{key}"
    for name in position_tables(model, tensors):
        yield f"{name}.weight"


def position_tables(model: nn.Module, tensors: TensorLayout) -> list[str]:
    """Plain embeddings of hidden width other than the tokens'."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and name != tensors.embedding and module.embedding_dim == tensors.hidden_size
    ]


def _shared(grid: Grid, kind: str) -> Shared:
    side, layers = grid.sizes["i"], grid.sizes.get("d", 1)
    if kind == WEIGHTS:
        return Shared(copies=layers, over="d" if layers > 1 else None)
    if grid.mode == "3d":
        return Shared(copies=side**2, over="ij" if kind == STREAM else "ik")
    return Shared(copies=side * layers, over="di" if layers > 1 else "i")


def _not_on_grids(model: str, reason: str) -> TensorParallelError:
    return TensorParallelError(f"{model} cannot be sharded on a grid: {reason}", hint="use tensor_parallel.mode = '1d'")
