"""The teacher of a shrunk run: the given one with few and narrow layers, at random weights, in a folder of its own.

Its logits are spread as those of a trained model are, so that divergence and temperature matter; and it drops where its
family can, so that a teacher that is not in evaluation mode is another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.core.run_spec import ModelSpec, RunSpec
from weft.models.build import build_config
from weft.models.small_config import depth_overrides, width_factor, width_overrides

SEED, SPREAD, DROPOUT = 11, 8.0, 0.1
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout")


def with_small_teacher(run: RunSpec, folder: Path, *, is_writer: bool) -> tuple[RunSpec, list[str]]:
    """The run with the teacher in `folder`, and the change; one process writes it, and others read it later."""
    name = run.objective.teacher
    if name is None:
        return run, []
    if is_writer:
        write_teacher(small_config(name), folder)
    objective = run.objective.model_copy(update={"teacher": str(folder)})
    return run.model_copy(update={"objective": objective}), ["teacher: a small one at random weights"]


def small_config(name: str) -> Any:
    """The Hugging Face config of a small teacher."""
    config = build_config(ModelSpec(path=name), vocab_size=1)
    text = config.get_text_config()
    overrides = depth_overrides(text, least=2) | width_overrides(text, width_factor(text, tp=1), tp=1, ep=1)
    small = build_config(ModelSpec(path=name, config=overrides), vocab_size=1)
    for key in DROPOUT_KEYS:
        if isinstance(getattr(small, key, None), int | float):
            setattr(small, key, DROPOUT)
    return small


@torch.no_grad()
def write_teacher(config: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        teacher: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    teacher.get_output_embeddings().weight.mul_(SPREAD)
    teacher.save_pretrained(str(folder))
