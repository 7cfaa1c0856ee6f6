"""The teacher of a distillation in a dry run: its modules and shapes, no values."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.precision import torch_dtype
from weft.models.build import build_skeleton
from weft.models.hf_config import config_from_folder
from weft.zoo.hub import model_folder


def teacher_skeleton(run: RunSpec, plan: Plan) -> nn.Module | None:
    """The teacher on the meta device, in the plan's compute dtype; built outside of fake tensors, as models are."""
    if run.objective.teacher is None:
        return None
    name = run.objective.teacher
    skeleton = build_skeleton(config_from_folder(model_folder(name), {}, name=name), attention=run.model.attention)
    dtype = torch_dtype(plan.precision.policy().weights)
    for parameter in skeleton.parameters():
        parameter.data = parameter.data.to(dtype)
    return skeleton.eval().requires_grad_(requires_grad=False)


def allocated(skeleton: nn.Module, *, device: torch.device) -> nn.Module:
    """The teacher with memory for its parameters and buffers."""
    return skeleton.to_empty(device=device)
