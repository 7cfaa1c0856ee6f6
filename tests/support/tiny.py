"""Tiny models of real Hugging Face families, batches that depend on the step alone, and engines over them.

For tests only. Widths are small, structure is whole: grouped queries, ties, dropout, learned positions, experts.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

CPU = torch.device("cpu")
_ROTARY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

FAMILIES: dict[str, ModelSpec] = {
    "llama": ModelSpec(type="llama", config={**_ROTARY, "num_hidden_layers": 6}),
    "qwen3-tied": ModelSpec(type="qwen3", config={**_ROTARY, "head_dim": 8, "tie_word_embeddings": True}),
    # dropout 0.1 is GPT-2's own default: it must not depend on the layout either
    "gpt2": ModelSpec(type="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    # with a block for each of four pipeline stages
    "qwen3-four": ModelSpec(
        type="qwen3", config={**_ROTARY, "num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": True}
    ),
    "gpt2-four": ModelSpec(type="gpt2", config={"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
    "mixtral": ModelSpec(type="mixtral", config={**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def build_engine(
    family: str | ModelSpec,
    plan: dict[str, Any] | None = None,
    *,
    optimizer: OptimizerPolicy | None = None,
    seed: int = 0,
    device: torch.device = CPU,
    **options: Any,
) -> Engine:
    """An engine over the family's model under a plan given as tables."""
    spec = family if isinstance(family, ModelSpec) else FAMILIES[family]
    config = build_config(spec, vocab_size=257)
    skeleton = build_skeleton(config)
    return Engine(
        build_skeleton(config, attention=spec.attention),
        Plan.from_tables(plan or {}),
        optimizer=optimizer or OptimizerPolicy(learning_rate=3e-4),
        weights=InitialWeights(skeleton, describe(skeleton), seed=seed, device=CPU),
        seed=seed,
        device=device,
        **options,
    )


def global_batch(step: int, *, rows: int = 16, length: int = 16, uneven: bool = True) -> dict[str, torch.Tensor]:
    """A global batch that depends on the step alone; `uneven` takes labels away, so ranks carry different weights."""
    tokens = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(1000 + step))
    labels = tokens[:, 1:].clone()
    if uneven:
        labels[0, : length // 2] = -100
        labels[rows // 2, 2:] = -100
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def train_steps(engine: Engine, steps: int, *, first: int = 0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    records = [engine.step(engine.share_of(global_batch(step))) for step in range(first, first + steps)]
    return [(record.loss, record.grad_norm) for record in records]
