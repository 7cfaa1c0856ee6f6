"""The teacher of a distillation: a whole Hugging Face model on every rank, frozen, in the plan's compute dtype."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from weft.core.errors import ModelError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.precision import torch_dtype
from weft.train.isolation import require_isolation
from weft.zoo.hub import model_folder


def open_teacher(run: RunSpec, plan: Plan, config: Any, *, device: torch.device) -> nn.Module:
    """The model of objective.teacher; `config`: the student's, whose vocabulary it must have."""
    name = str(run.objective.teacher)
    folder = model_folder(name, weights=True)
    with redirect_stderr(io.StringIO()):  # progress bars
        teacher: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(plan.precision.policy().weights),
            attn_implementation=run.model.attention,
            trust_remote_code=False,
        )
    sizes = [int(one.get_text_config().vocab_size) for one in (teacher.config, config)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"objective.teacher = {name!r} has a vocabulary of {sizes[0]}, and the trained model one of {sizes[1]}",
            hint="distillation needs a teacher with the tokenizer and the vocabulary of the student",
        )
    require_isolation(run.data, teacher)
    frozen: nn.Module = teacher.eval().requires_grad_(requires_grad=False).to(device)
    return frozen
