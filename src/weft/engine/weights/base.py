"""Storage of an adapter's frozen base, on the meta device: codes of linear layers, the compute dtype for all else.

A parameter in codes keeps its name. Its rows are bytes: what a slice of columns means is read from `RowCodes`.
Weights of routers rest as trained ones, since they may compute in float32.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import AdapterError
from weft.core.quantised_base import LEAST_GROUP
from weft.core.shards import LocalShard
from weft.engine.ownership import LocalShards
from weft.engine.weights.materialise import replace_parameter
from weft.models.adapter.lora import rests_low
from weft.models.adapter.quantised import RowCodes, quantised_linears, row_codes_of
from weft.models.adapter.targets import is_router
from weft.models.layout import ModelLayout


@torch.no_grad()
def store_base(model: nn.Module, layout: ModelLayout, compute: torch.dtype, *, shards: LocalShards) -> None:
    """Give frozen parameters of this rank their storage; nothing without an adapter, or of base = "model"."""
    if not rests_low(model):
        return
    in_codes = set()
    for name, module in quantised_linears(model):
        if module.weight is not None:  # of this rank's stages
            weight = f"{name}.weight"
            in_codes.add(weight)
            module.row_codes = _row_codes(weight, module, shards.get(weight))
            stored = torch.empty(module.weight.shape[0], module.row_codes.num_bytes, dtype=torch.uint8, device="meta")
            replace_parameter(model, layout, weight, nn.Parameter(stored, requires_grad=False))
    for name in layout.unit_of:
        parameter = model.get_parameter(name)
        is_other = parameter.is_floating_point() and not parameter.requires_grad and not is_router(name)
        if is_other and parameter.dtype != compute:
            replace_parameter(model, layout, name, nn.Parameter(parameter.detach().to(compute), requires_grad=False))


def _row_codes(name: str, module: nn.Module, shard: LocalShard | None) -> RowCodes:
    shape = shard.shape if shard is not None else tuple(module.weight.shape)  # type: ignore[arg-type]
    edges: set[int] = set()
    for chunk in shard.chunks if shard is not None else ():
        edges |= {chunk.offsets[-1], chunk.local_offsets[-1], chunk.sizes[-1]}
    found = row_codes_of(name.removesuffix(".weight"), module, full_columns=shape[-1], edges=edges)
    if found.group < LEAST_GROUP:
        raise AdapterError(
            f"{name} has {shape[-1]:,} columns, and this layout gives a rank pieces of {found.group} of them: "
            f"codes of the base need multiples of {LEAST_GROUP}",
            hint="choose a smaller mesh.tp, or adapter.base = 'bfloat16'",
        )
    return found
