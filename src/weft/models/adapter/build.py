"""The model of a run with its adapters, on the meta device, and the source of its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.core.run_spec import RunSpec
from weft.models.adapter.lora import insert_adapter, leave_base_out
from weft.models.adapter.quantised import rounded_source
from weft.models.adapter.values import AdaptedWeights
from weft.models.build import build_skeleton
from weft.models.initial import InitialWeights, WeightSource
from weft.models.layout import describe
from weft.zoo.hub import reads_weights


def run_skeleton(run: RunSpec, config: Any) -> nn.Module:
    """The run's model with its adapters: parameters on the meta device."""
    model = build_skeleton(config, attention=run.model.attention)
    insert_adapter(model, run.adapter)
    if run.adapter.is_on and reads_weights(run.model):
        leave_base_out(model)
    return model


def initial_weights(run: RunSpec, config: Any, *, device: torch.device) -> WeightSource:
    """Random weights of the run's model, by (seed, module name)."""
    skeleton = build_skeleton(config, attention=run.model.attention)
    drawn = InitialWeights(skeleton, describe(skeleton), seed=run.train.seed, device=drawing_device(run, device))
    return with_adapter(drawn, run, config)


def drawing_device(run: RunSpec, device: torch.device) -> torch.device:
    """Where random weights are drawn. A base in codes is not saved: an export draws it again, on a CPU."""
    return torch.device("cpu") if run.adapter.is_quantised else device


def with_adapter(base: WeightSource, run: RunSpec, config: Any) -> WeightSource:
    """The source of the run's model; `base` has the values of the model without adapters."""
    if not run.adapter.is_on:
        return base
    model = run_skeleton(run, config)
    return AdaptedWeights(rounded_source(base, model), model, run.adapter, seed=run.train.seed)
