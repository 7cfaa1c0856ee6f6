"""The cost of each block per token, by which `core/stages.py` balances pipeline stages.

a Hugging Face causal LM   the planner's, from the same derivation (`models/shape`)
any other module           parameter elements: of the block and of modules between it and the next. Modules before the
                           first block and after the last are counted there. A lookup in nn.Embedding costs nothing
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn

from weft.core.errors import WeftError
from weft.core.model_shape import ModelShape
from weft.core.stages import partition_blocks, partition_shape
from weft.models.layout import ROOT, ModelLayout
from weft.models.pp.probe import Trace
from weft.models.shape.derive import shape_of_model


def partition_model(model: nn.Module, layout: ModelLayout, trace: Trace, *, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, by cost; the same on every rank."""
    shape = planned_shape(model)
    if shape is not None and shape.num_layers == len(trace.order) and trace.order == layout.blocks:
        return partition_shape(shape, num_stages)
    before, costs, after = count_elements(model, layout, trace)
    return partition_blocks(costs, before=before, after=after, num_stages=num_stages)


def planned_shape(model: nn.Module) -> ModelShape | None:
    """The planner's shape of the model's config; None without a config, or without a head over a vocabulary."""
    config: Any = getattr(model, "config", None)
    find_head = getattr(model, "get_output_embeddings", None)
    if not hasattr(config, "to_dict") or not callable(find_head) or find_head() is None:
        return None
    try:
        return shape_of_model(model)
    except (WeftError, AttributeError, LookupError, TypeError, ValueError):
        return None


def count_elements(model: nn.Module, layout: ModelLayout, trace: Trace) -> tuple[int, list[int], int]:
    """(cost before the first block, cost of each block with the modules after it, cost after the last)."""
    before, costs, after = 0, [0] * len(trace.order), 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            continue
        unit, size = layout.unit_of[layout.ties.get(name, name)], prod(parameter.shape)
        # parameters that the probe did not see are the head's or unused: both are on the last stage
        time = trace.order.index(unit) + 1 if unit in trace.order else max(trace.uses.get(name, {len(costs)}))
        if unit == ROOT and time == len(costs):
            after += size
        elif time == 0:
            before += size
        elif unit == ROOT or unit in trace.order:
            costs[time - 1] += size
    return before, costs, after
