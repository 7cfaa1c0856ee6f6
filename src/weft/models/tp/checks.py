"""Checks a region's sizes against the tensors it names: a region whose sizes do not add up is declined.

features of the segments = size of the dimension they divide
units of every column segment divide with the units of the row's inputs: heads with heads, width with width
"""

from __future__ import annotations

from torch import nn

from weft.models.tp.layout import LinearShards, Region, Segments


def wrong_arithmetic(region: Region, model: nn.Module, *, hidden_size: int) -> str | None:
    """The reason why the region's sizes do not add up, or None."""
    for linear in region.linears:
        if _sizes(linear) != _weight_sizes(linear, model):
            return f"its {_last(linear.name)} is {_weight_sizes(linear, model)}, not {_sizes(linear)}"
    for tensor in region.tensors:
        size = model.get_parameter(tensor.name).shape[tensor.dim]
        if features(tensor.segments) != size:
            return f"its {_last(tensor.name)} has {size} in dimension {tensor.dim}, not {features(tensor.segments)}"
    for norm in region.wide_norms:
        if any(
            parameter.numel() != features(norm.segments) for parameter in model.get_submodule(norm.name).parameters()
        ):
            return f"its {_last(norm.name)} is not as wide as its input"
    return _wrong_row(region, hidden_size) if region.linears else None


def features(segments: Segments) -> int:
    return sum(segment.features for segment in segments)


def _wrong_row(region: Region, hidden_size: int) -> str | None:
    rows = [linear for linear in region.linears if linear.side == "row"]
    if len(rows) != 1 or features(rows[0].outputs) != hidden_size:
        return "it does not end in one projection to the hidden size"
    units = rows[0].inputs[0].units
    for linear in region.linears:
        for segment in linear.outputs if linear.side == "column" else ():
            if segment.units < 1 or segment.size < 1 or units % segment.units:
                return f"its {_last(linear.name)} divides into {segment.units}, its output projection into {units}"
    heads, kv_heads = region.heads, region.kv_heads
    if heads is not None and kv_heads is not None and heads.units % kv_heads.units:
        return f"its {heads.units} heads do not share {kv_heads.units} key-value heads evenly"
    return None


def _sizes(linear: LinearShards) -> tuple[int, int]:
    return features(linear.inputs), features(linear.outputs)


def _weight_sizes(linear: LinearShards, model: nn.Module) -> tuple[int, int]:
    rows, columns = model.get_parameter(f"{linear.name}.weight").shape
    return (rows, columns) if linear.is_transposed else (columns, rows)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
