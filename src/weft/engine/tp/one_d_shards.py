"""Local shards of parameters under one-dimensional tensor parallelism.

    column linear     weight rows (outputs) and bias sharded        row linear   weight columns (inputs) sharded
    embedding, head   rows sharded, the last rank may have fewer    others       replicated

A replicated parameter's gradient is summed over tp where each rank has a partial sum: inside a region, since a rank
computes with its heads or columns; with sequence parallel everywhere in a block, since it has a slice of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from weft.core.errors import TensorParallelError
from weft.core.shards import LocalShard, Span, even_span, local_shard, replicated_shard
from weft.engine.tp.grid import TP_GROUP
from weft.models.layout import ModelLayout
from weft.models.tp.layout import LinearShards, Region, Segment, Segments, TensorLayout

LARGEST_DEGREE = 128  # hints name legal degrees up to here


def one_d_shards(
    model: nn.Module, layout: ModelLayout, tensors: TensorLayout, *, degree: int, place: int, sequence_parallel: bool
) -> dict[str, LocalShard]:
    """The local shard of every parameter (by canonical name) on the rank at `place` of `degree`."""
    require_degree(tensors, degree)
    spans = {
        name: {dim: partition(segments, degree=degree, place=place)}
        for name, dim, segments in _sharded_dims(model, tensors)
    }
    spans |= {
        name: {0: [_vocabulary_span(model, name, degree=degree, place=place)]} for name in _vocabulary(model, tensors)
    }
    partial = {name for region in tensors.regions for name in region.partial}
    _require_known(model, tensors, known={*spans, *partial})
    in_blocks = tuple(f"{block}." for block in layout.blocks)
    shards = {}
    for name, parameter in model.named_parameters():
        aliases = (name, *(alias for alias, canonical in layout.ties.items() if canonical == name))
        by_dim = next((spans[alias] for alias in aliases if alias in spans), None)
        if by_dim is not None:
            [own] = by_dim.values()
            repeats = {span.copies: f"repeat{span.copies}" for span in own if span.copies > 1}
            shards[name] = local_shard(parameter.shape, by_dim, summed_over=repeats)
            continue
        is_partial = name in partial or (sequence_parallel and name.startswith(in_blocks))
        shards[name] = replicated_shard(parameter.shape, copies=degree, summed_over=TP_GROUP if is_partial else None)
    return shards


def partition(segments: Iterable[Segment], *, degree: int, place: int) -> list[Span]:
    """The spans of a dimension on the rank at `place` of `degree`, one per segment."""
    spans, begin = [], 0
    for segment in segments:
        if segment.units >= degree:
            size = segment.units // degree * segment.size
            spans.append(Span(begin=begin + place * size, size=size))
        else:
            unit = place * segment.units // degree
            spans.append(Span(begin=begin + unit * segment.size, size=segment.size, copies=degree // segment.units))
        begin += segment.features
    return spans


def local_units(segment: Segment, degree: int) -> int:
    return max(1, segment.units // degree)


def divides(segment: Segment, degree: int) -> bool:
    return segment.units % degree == 0 or (segment.may_repeat and degree % segment.units == 0)


def require_degree(tensors: TensorLayout, degree: int) -> None:
    """Refuse a degree that does not divide some module; the hint names the nearest degrees that divide all."""
    for owner, segment, units in _segments(tensors):
        if not divides(segment, degree):
            raise TensorParallelError(
                f"{owner} has {segment.units} {units}, which do not divide over {degree} tensor-parallel ranks",
                hint=_nearest(tensors, degree),
            )


def repeats(tensors: TensorLayout, degree: int) -> set[int]:
    """The numbers of neighbours that hold the same unit, for segments with fewer units than ranks."""
    return {degree // segment.units for _, segment, _ in _segments(tensors) if segment.units < degree}


def _require_known(model: nn.Module, tensors: TensorLayout, *, known: set[str]) -> None:
    """A parameter inside a region must be sharded, or have a summed gradient, or be a bias added after the sum.

    A parameter missed here would silently train on a partial sum of its gradient.
    """
    inside = tuple(f"{entry}." for region in tensors.regions for entry in region.entries)
    linears = [linear for region in tensors.regions for linear in region.linears]
    after = {f"{linear.name}.bias" for linear in linears if linear.side == "row"}
    for name, _ in model.named_parameters():
        if name.startswith(inside) and name not in known | after:
            raise TensorParallelError(
                f"{name} is inside a sharded region, and weft does not know its role there",
                hint="use mesh.tp = 1, and report the model",
            )


def _sharded_dims(model: nn.Module, tensors: TensorLayout) -> Iterator[tuple[str, int, Segments]]:
    """(parameter, dimension, segments) of every sharded parameter of the regions."""
    for region in tensors.regions:
        for linear in region.linears:
            yield from _sharded_dims_of(model, linear)
        for tensor in region.tensors:
            yield tensor.name, tensor.dim, tensor.segments
        for norm in region.wide_norms:
            for key, _ in model.get_submodule(norm.name).named_parameters(recurse=False):
                yield f"{norm.name}.{key}", 0, norm.segments


def _sharded_dims_of(model: nn.Module, linear: LinearShards) -> Iterator[tuple[str, int, Segments]]:
    is_column = linear.side == "column"
    yield (
        f"{linear.name}.weight",
        int(is_column == linear.is_transposed),
        linear.outputs if is_column else linear.inputs,
    )
    if is_column and getattr(model.get_submodule(linear.name), "bias", None) is not None:
        yield f"{linear.name}.bias", 0, linear.outputs


def _vocabulary(model: nn.Module, tensors: TensorLayout) -> list[str]:
    """The parameters with one row per token."""
    modules = [name for name in (tensors.embedding, tensors.head) if name is not None]
    return [f"{name}.{key}" for name in modules for key, _ in model.get_submodule(name).named_parameters(recurse=False)]


def _vocabulary_span(model: nn.Module, name: str, *, degree: int, place: int) -> Span:
    rows = model.get_parameter(name).shape[0]
    if even_span(rows, degree=degree, place=degree - 1).size == 0:
        raise TensorParallelError(
            f"{name} has {rows} rows, too few for {degree} tensor-parallel ranks", hint="use a smaller mesh.tp"
        )
    return even_span(rows, degree=degree, place=place)


def _segments(tensors: TensorLayout) -> Iterator[tuple[str, Segment, str]]:
    for region in tensors.regions:
        for segments in _segments_of(region):
            for segment in segments:
                yield region.name, segment, _unit_name(region, segment)


def _segments_of(region: Region) -> Iterator[Segments]:
    for linear in region.linears:
        yield linear.outputs if linear.side == "column" else linear.inputs
    yield from (tensor.segments for tensor in region.tensors)
    yield from (norm.segments for norm in region.wide_norms)


def _unit_name(region: Region, segment: Segment) -> str:
    if region.kind != "attention":
        return "columns"
    return "key-value heads" if segment.may_repeat else "heads"


def _nearest(tensors: TensorLayout, degree: int) -> str:
    legal = [
        other
        for other in range(2, LARGEST_DEGREE + 1)
        if all(divides(segment, other) for _, segment, _ in _segments(tensors))
    ]
    below = max((other for other in legal if other < degree), default=None)
    above = min((other for other in legal if other > degree), default=None)
    near = [str(other) for other in (below, above) if other is not None]
    return f"the nearest degrees that divide are mesh.tp = {' and '.join(near)}" if near else "use mesh.tp = 1"
