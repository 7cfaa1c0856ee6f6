"""The model, the batch and the cores that the pipeline benchmarks share. It runs nothing by itself.

A Llama whose table and head are small beside its blocks, so that equal numbers of blocks are equal stages.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from weft.core.plan import Plan
from weft.engine.engine import Engine

CPU = torch.device("cpu")
MICROBATCHES = 8
SHAPE = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 6, "vocab_size": 320,
}  # fmt: skip
LENGTH = 256
SMALL_SHAPE = {**SHAPE, "hidden_size": 48, "intermediate_size": 96}  # for a look, and for tests
SMALL_LENGTH = 16
LEARNING_RATE = 1e-4


def build_model(*, small: bool) -> Any:
    """The same values in every process, and at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(**(SMALL_SHAPE if small else SHAPE))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def build_engine(*, degree: int, schedule: str, virtual_stages: int = 1, small: bool) -> Engine:
    plan = {
        "mesh": {"pp": degree},
        "pipeline": {"schedule": schedule, "virtual_stages": virtual_stages, "microbatches": MICROBATCHES},
    }
    return Engine(build_model(small=small), Plan.from_tables(plan), optimizer=build_optimizer, device=CPU)


def build_optimizer(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def make_batch(*, small: bool) -> dict[str, torch.Tensor]:
    """One row a micro-batch, the same on every rank."""
    length = SMALL_LENGTH if small else LENGTH
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE["vocab_size"], (MICROBATCHES, length + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def pin(rank: int) -> None:
    """This rank's computing thread to a core of its own, as far as cores go round; Gloo's threads stay free."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def waited_for_core_s() -> float:
    """How long this thread was ready and did not run, since it began: what others on the machine took from it."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text(encoding="ascii").split()[1]) / 1e9 if path.exists() else 0.0


def versions() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), one thread a rank; torch {torch.__version__},"
        f" transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def sizes(*, small: bool) -> str:
    shape, length = (SMALL_SHAPE, SMALL_LENGTH) if small else (SHAPE, LENGTH)
    return (
        f"Llama of {shape['num_hidden_layers']} blocks, width {shape['hidden_size']}, vocabulary"
        f" {shape['vocab_size']}, float32; {MICROBATCHES} micro-batches of 1 x {length} tokens"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
