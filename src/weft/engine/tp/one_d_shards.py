"""Local shards of parameters under one-dimensional tensor parallelism, and sharding of a model's parameters.

    column linear   weight rows (outputs) and bias cut        row linear   weight columns (inputs) cut, bias whole
    token table, head   rows cut, the last rank may have fewer     anything else   whole

A whole parameter's gradient is summed over tp where each rank has only its share of it: inside a region, since a rank
computes with its own heads or columns; with sequence parallel everywhere in a block, since it sees its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from weft.core.errors import TensorParallelError
from weft.core.shards import LocalShard, Span, even_span, local_shard, replicated_shard
from weft.engine.tp.grid import WHOLE
from weft.models.layout import ModelLayout
from weft.models.tp.layout import LinearCut, Region, Segment, Segments, TensorLayout

LARGEST_DEGREE = 128  # nearest legal degrees are looked for up to here


def one_d_shards(
    model: nn.Module, layout: ModelLayout, tensors: TensorLayout, *, degree: int, place: int, sequence_parallel: bool
) -> dict[str, LocalShard]:
    """The shard of every parameter (by canonical name) that the rank at `place` of `degree` holds."""
    require_degree(tensors, degree)
    runs = {name: {dim: deal(segments, degree=degree, place=place)} for name, dim, segments in _cuts(model, tensors)}
    runs |= {
        name: {0: [_vocabulary_run(model, name, degree=degree, place=place)]} for name in _vocabulary(model, tensors)
    }
    partial = {name for region in tensors.regions for name in region.partial}
    _require_understood(model, tensors, known={*runs, *partial})
    in_blocks = tuple(f"{block}." for block in layout.blocks)
    shards = {}
    for name, parameter in model.named_parameters():
        aliases = (name, *(alias for alias, canonical in layout.ties.items() if canonical == name))
        cut = next((runs[alias] for alias in aliases if alias in runs), None)
        if cut is not None:
            [dealt] = cut.values()
            repeats = {run.copies: f"repeat{run.copies}" for run in dealt if run.copies > 1}
            shards[name] = local_shard(parameter.shape, cut, summed_over=repeats)
            continue
        is_partial = name in partial or (sequence_parallel and name.startswith(in_blocks))
        shards[name] = replicated_shard(parameter.shape, copies=degree, summed_over=WHOLE if is_partial else None)
    return shards


def deal(segments: Iterable[Segment], *, degree: int, place: int) -> list[Span]:
    """The runs of a dimension that `place` of `degree` gets, one a segment."""
    runs, begin = [], 0
    for segment in segments:
        if segment.units >= degree:
            size = segment.units // degree * segment.size
            runs.append(Span(begin=begin + place * size, size=size))
        else:
            unit = place * segment.units // degree
            runs.append(Span(begin=begin + unit * segment.size, size=segment.size, copies=degree // segment.units))
        begin += segment.features
    return runs


def local_units(segment: Segment, degree: int) -> int:
    return max(1, segment.units // degree)


def divides(segment: Segment, degree: int) -> bool:
    return segment.units % degree == 0 or (segment.may_repeat and degree % segment.units == 0)


def require_degree(tensors: TensorLayout, degree: int) -> None:
    """Refuse a degree that some module cannot be divided by; name the nearest degree that divides all."""
    for owner, segment, what in _segments(tensors):
        if not divides(segment, degree):
            raise TensorParallelError(
                f"{owner} has {segment.units} {what}, which {degree} tensor-parallel ranks cannot share evenly",
                hint=_nearest(tensors, degree),
            )


def repeats(tensors: TensorLayout, degree: int) -> set[int]:
    """How many neighbours hold the same unit, wherever units are fewer than ranks."""
    return {degree // segment.units for _, segment, _ in _segments(tensors) if segment.units < degree}


@torch.no_grad()
def shard_parameters(model: nn.Module, layout: ModelLayout, shards: dict[str, LocalShard]) -> None:
    """Replace every cut parameter by this rank's own shard of it, at all its names; values stay."""
    for name, shard in shards.items():
        parameter = model.get_parameter(name)
        if not shard.is_sharded:
            continue
        own = torch.empty(shard.local_shape, dtype=parameter.dtype, device=parameter.device)
        if parameter.device.type != "meta":
            for chunk in shard.chunks:
                own[chunk.local_index].copy_(parameter[chunk.global_index])
        replacement = nn.Parameter(own, requires_grad=parameter.requires_grad)
        for alias in (name, *(alias for alias, canonical in layout.ties.items() if canonical == name)):
            owner, _, key = alias.rpartition(".")
            model.get_submodule(owner)._parameters[key] = replacement


def _require_understood(model: nn.Module, tensors: TensorLayout, *, known: set[str]) -> None:
    """A parameter inside a region is cut, or its gradient is summed, or it is a bias added after the sum: nothing else.

    One that is forgotten would train on a share of its gradient, without a word.
    """
    inside = tuple(f"{entry}." for region in tensors.regions for entry in region.entries)
    linears = [linear for region in tensors.regions for linear in region.linears]
    after = {f"{linear.name}.bias" for linear in linears if linear.side == "row"}
    for name, _ in model.named_parameters():
        if name.startswith(inside) and name not in known | after:
            raise TensorParallelError(
                f"{name} lies in a shard of the model that is divided, and weft does not know what it does there",
                hint="use mesh.tp = 1, and report the model",
            )


def _cuts(model: nn.Module, tensors: TensorLayout) -> Iterator[tuple[str, int, Segments]]:
    """(parameter, dimension, segments) of everything that regions cut."""
    for region in tensors.regions:
        for linear in region.linears:
            yield from _linear_cuts(model, linear)
        for tensor in region.tensors:
            yield tensor.name, tensor.dim, tensor.segments
        for norm in region.wide_norms:
            for key, _ in model.get_submodule(norm.name).named_parameters(recurse=False):
                yield f"{norm.name}.{key}", 0, norm.segments


def _linear_cuts(model: nn.Module, linear: LinearCut) -> Iterator[tuple[str, int, Segments]]:
    is_column = linear.side == "column"
    yield (
        f"{linear.name}.weight",
        int(is_column == linear.is_transposed),
        linear.outputs if is_column else linear.inputs,
    )
    if is_column and getattr(model.get_submodule(linear.name), "bias", None) is not None:
        yield f"{linear.name}.bias", 0, linear.outputs


def _vocabulary(model: nn.Module, tensors: TensorLayout) -> list[str]:
    """The parameters whose rows are tokens."""
    modules = [name for name in (tensors.embedding, tensors.head) if name is not None]
    return [f"{name}.{key}" for name in modules for key, _ in model.get_submodule(name).named_parameters(recurse=False)]


def _vocabulary_run(model: nn.Module, name: str, *, degree: int, place: int) -> Span:
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
                yield region.name, segment, _words(region, segment)


def _segments_of(region: Region) -> Iterator[Segments]:
    for linear in region.linears:
        yield linear.outputs if linear.side == "column" else linear.inputs
    yield from (tensor.segments for tensor in region.tensors)
    yield from (norm.segments for norm in region.wide_norms)


def _words(region: Region, segment: Segment) -> str:
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
