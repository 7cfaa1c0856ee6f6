"""Experts in three-dimensional tensors as a region: every rank has a slice of every expert's width.

    gate_up [experts, 2 width, hidden]   down [experts, hidden, width]      (or each with its last two swapped)

The router is outside: all ranks route alike. A bias of the down projection is declined: every rank would add it.
"""

from __future__ import annotations

from torch import nn

from weft.models.tp.layout import ParameterShards, Region, Segment, Segments
from weft.models.tp.roles import DeclinedError, Site, names_used
from weft.zoo.tensor_exceptions import REPLICATED_EXPERTS

_UP = ("gate_up_proj", "up_proj", "gate_proj")


def experts_region(site: Site) -> Region | None:
    """The region of a module of experts; None without a three-dimensional down projection."""
    down = site.module._parameters.get("down_proj")
    ups = {name: site.module._parameters[name] for name in _UP if site.module._parameters.get(name) is not None}
    if down is None or down.dim() != 3 or not ups:
        return None
    if site.model_type in REPLICATED_EXPERTS:
        raise DeclinedError(REPLICATED_EXPERTS[site.model_type])
    if getattr(site.module, "has_post_expert_norm", False):
        raise DeclinedError("it normalises each expert's output before the sum over ranks")
    known = {"down_proj", *ups}
    for name, _ in site.module.named_parameters():
        if name not in known:
            raise DeclinedError(f"its {name} would be added once per rank" if "bias" in name else f"unknown {name}")
    width_dim, width = _width(site, down)
    up_dim = 3 - width_dim
    shards = [
        ParameterShards(name=site.child(name), dim=up_dim, segments=_up_segments(site, name, up, up_dim, width))
        for name, up in ups.items()
        if up is not None
    ]
    shards.append(ParameterShards(name=site.child("down_proj"), dim=width_dim, segments=(Segment(units=width),)))
    return Region(kind="experts", name=site.name, entries=(site.name,), tensors=tuple(shards), leaves_at=site.name)


def _width(site: Site, down: nn.Parameter) -> tuple[int, int]:
    """(dimension, size) of the experts' width in the down projection, from the module's attributes or its shapes."""
    is_transposed = getattr(site.module, "is_transposed", None)
    if not isinstance(is_transposed, bool):
        if down.shape[1] == down.shape[2]:
            raise DeclinedError("the order of its matrices' dimensions is not known")
        is_transposed = down.shape[2] == site.hidden_size
    dim = 1 if is_transposed else 2
    if down.shape[3 - dim] != site.hidden_size:
        raise DeclinedError("the outputs of its down projection are not hidden_size")
    return dim, down.shape[dim]


def _up_segments(site: Site, name: str, up: nn.Parameter, dim: int, width: int) -> Segments:
    if up.shape[0] != site.module.get_parameter("down_proj").shape[0]:
        raise DeclinedError(f"its {name} and its down_proj differ in the number of experts")
    if up.dim() != 3 or up.shape[3 - dim] != site.hidden_size:
        raise DeclinedError(f"the inputs of its {name} are not hidden_size")
    if up.shape[dim] == width:
        return (Segment(units=width),)
    is_chunked = "chunk" in names_used(site.module) and getattr(site.module, "is_concatenated", True) is True
    if up.shape[dim] == 2 * width and is_chunked:
        return (Segment(units=width), Segment(units=width))
    raise DeclinedError(f"the order of its {name} is not known")
