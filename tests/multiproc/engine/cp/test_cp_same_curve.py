"""Context parallelism has the curve of one process: families, splits, attentions, documents, other axes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL
from torch._dynamo.utils import counters

import weft.engine.cp.row_masks as row_masks
import weft.engine.kernels.compiled as compiled
from weft.core.run_spec import ModelSpec

STEPS, LENGTH = 4, 32
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": ModelSpec(type="llama", config=_SIZES),
    "qwen3": ModelSpec(type="qwen3", config={**_SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "phi3": ModelSpec(
        type="phi3",
        config={**_SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0},
    ),
    "gemma3_text": ModelSpec(
        type="gemma3_text",
        config={
            **_SIZES, "head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": ModelSpec(
        type="gpt_oss",
        config={
            **_SIZES, "head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip
CP2: dict[str, Any] = {"mesh": {"cp": 2}}
RING = {"attention": "ring"}
PAIRS = {**RING, "ulysses": 2}  # of four ranks: two exchange heads, and pass keys and values to the other two
ZIGZAG, CONTIGUOUS = {"split": "zigzag"}, {"split": "contiguous"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "alone": CP2,
        "contiguous": {**CP2, "context_parallel": CONTIGUOUS},
        "ulysses": {**CP2, "context_parallel": {"attention": "ulysses"}},
        "ring": {**CP2, "context_parallel": RING},
        "ring, contiguous": {**CP2, "context_parallel": {**RING, **CONTIGUOUS}},
        "ZeRO-3": {**CP2, "data_parallel": {"zero": 3}},
        "recompute": {**CP2, "activations": {"policy": "full"}, "pipeline": {"microbatches": 2}},
        "selective": {**CP2, "activations": {"policy": "selective"}, "data_parallel": {"zero": 1}},
        "ring, recompute": {
            **CP2, "context_parallel": RING, "activations": {"policy": "full"}, "pipeline": {"microbatches": 2},
        },
        "ring, selective, ZeRO-3": {
            **CP2, "context_parallel": RING, "activations": {"policy": "selective"}, "data_parallel": {"zero": 3},
        },
    },
    4: {
        "cp 4": {"mesh": {"cp": 4}},
        "cp 4, contiguous": {"mesh": {"cp": 4}, "context_parallel": CONTIGUOUS},
        "cp 4, ulysses": {"mesh": {"cp": 4}, "context_parallel": {"attention": "ulysses"}},
        "cp 4, ring": {"mesh": {"cp": 4}, "context_parallel": RING},
        "cp 4, ring, contiguous": {"mesh": {"cp": 4}, "context_parallel": {**RING, **CONTIGUOUS}},
        "cp 2 x 2": {"mesh": {"cp": 4}, "context_parallel": PAIRS},
        "cp 2 x 2, contiguous": {"mesh": {"cp": 4}, "context_parallel": {**PAIRS, **CONTIGUOUS}},
        "cp 2 x 2, gather": {"mesh": {"cp": 4}, "context_parallel": {**PAIRS, "attention": "gather"}},
        "cp 2 x 2, ZeRO-3, recompute": {
            "mesh": {"cp": 4}, "context_parallel": PAIRS, "data_parallel": {"zero": 3},
            "activations": {"policy": "full"}, "pipeline": {"microbatches": 2},
        },
        "cp 2 x 2, gather, ZeRO-3, selective": {
            "mesh": {"cp": 4}, "context_parallel": {**PAIRS, "attention": "gather", **CONTIGUOUS},
            "data_parallel": {"zero": 3}, "activations": {"policy": "selective"},
        },
        "ring, ZeRO-3": {
            "mesh": {"cp": 2, "dp_shard": 2}, "context_parallel": RING, "data_parallel": {"zero": 3},
        },
        "ring, tp": {"mesh": {"cp": 2, "tp": 2}, "context_parallel": RING},
        "ring, pp": {"mesh": {"cp": 2, "pp": 2}, "context_parallel": RING, "pipeline": {"microbatches": 4}},
        "ZeRO-3": {"mesh": {"cp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "ZeRO-2": {"mesh": {"cp": 2, "dp_shard": 2}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}},
        "DDP": {"mesh": {"cp": 2, "dp_replicate": 2}},
        "HSDP": {"mesh": {"cp": 2, "dp_replicate": 2}, "data_parallel": {"zero": 3}},
        "tp": {"mesh": {"cp": 2, "tp": 2}},
        "tp, ulysses": {"mesh": {"cp": 2, "tp": 2}, "context_parallel": {"attention": "ulysses"}},
        "tp without sequence parallel": {
            "mesh": {"cp": 2, "tp": 2}, "tensor_parallel": {"sequence_parallel": False}, "kernels": {"loss": "fused"},
        },
        "pp": {"mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}},
        "pp, ZeRO-3": {
            "mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}, "data_parallel": {"zero": 3},
        },
    },
}  # fmt: skip


def batch_of(step: int, *, length: int, documents: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, 250, (8, length + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].clone()}
    batch["labels"][0, : length // 2] = -100
    batch["labels"][torch.rand(8, length, generator=generator) < 0.1] = -100
    if documents:  # borders at other places in each row, one of them where a piece ends
        borders = [sorted({0, length // 4, (5 * row + 3) % length, length}) for row in range(8)]
        batch["position_ids"] = torch.stack(
            [torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(row)]) for row in borders]
        )
    return batch


def curves(
    _rank: int, _world: int, family: str, plans: dict[str, dict[str, Any]], length: int, documents: bool
) -> dict[str, list[tuple[float, float, float]]]:
    row_masks.PIECE, row_masks.KEY_UNIT = 5, 4  # several pieces in these short rows
    found = {}
    for name, plan in plans.items():
        with build_engine(FAMILIES[family], plan) as engine:
            batches = [batch_of(step, length=length, documents=documents) for step in range(STEPS)]
            records = [engine.step(engine.share_of(batch)) for batch in batches]
            held_out = engine.evaluate(engine.share_of(batch_of(99, length=length, documents=documents)))
            found[name] = [(record.loss, record.grad_norm, record.tokens) for record in records]
            found[name].append((held_out.loss, records[-1].grad_norm, held_out.tokens))
    dist.barrier()
    return found


COMPILED: dict[str, Any] = {**CP2, "compile": {"enabled": True}}
COMPILED_LAYOUTS: dict[str, dict[str, Any]] = {
    "compiled": {**COMPILED, "data_parallel": {"zero": 3}},
    "compiled, recompute": {**COMPILED, "activations": {"policy": "full"}, "pipeline": {"microbatches": 2}},
    "compiled, ring": {**COMPILED, "context_parallel": RING},
    "compiled, ulysses": {**COMPILED, "context_parallel": {"attention": "ulysses"}},
}


def compiled_curves(
    rank: int, world: int, family: str, length: int, documents: bool
) -> dict[str, list[tuple[float, float, float]]]:
    compiled.BACKEND = "aot_eager"
    counters.clear()
    found = curves(rank, world, family, COMPILED_LAYOUTS, length, documents)
    assert counters["stats"]["unique_graphs"] > 0
    return found


CASES = by_default(
    [("llama", 2, True)],
    [(family, world, documents) for family in FAMILIES for world in LAYOUTS for documents in (False, True)],
)


@pytest.mark.parametrize(("family", "world", "documents"), CASES)
def test_every_layout_has_the_curve_of_one_process(family: str, world: int, documents: bool) -> None:
    length = LENGTH if documents else LENGTH - 3  # padded
    require_same_curves(family, LAYOUTS[world], world, length=length, documents=documents)


@pytest.mark.parametrize("family", by_default([], ["llama", "gemma3_text"], extended=["gemma3_text"]))
def test_compiled_blocks_have_the_curve_of_one_process(family: str) -> None:
    per_rank = run_ranks(compiled_curves, 2, family, LENGTH, True, timeout_s=240.0)
    require_equal_to_one_process(per_rank, family, length=LENGTH, documents=True)


def require_same_curves(
    family: str, plans: dict[str, dict[str, Any]], world: int, *, length: int, documents: bool
) -> None:
    per_rank = run_ranks(curves, world, family, plans, length, documents, timeout_s=240.0)
    require_equal_to_one_process(per_rank, family, length=length, documents=documents)


def require_equal_to_one_process(per_rank: list[Any], family: str, *, length: int, documents: bool) -> None:
    expected = run_ranks(curves, 1, family, {"one": {}}, length, documents)[0]["one"]
    assert all(found == per_rank[0] for found in per_rank), "ranks disagree about their own curve"
    for name, found in per_rank[0].items():
        for right, value in zip(expected, found, strict=True):
            assert abs(right[0] - value[0]) <= SAME_CURVE_LOSS_ABS, f"{name}: {found} is not {expected}"
            assert abs(right[1] - value[1]) <= SAME_CURVE_NORM_REL * right[1], f"{name}: {found} is not {expected}"
            assert right[2] == value[2]
