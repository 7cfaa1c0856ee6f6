"""Dropout beside context parallelism draws the masks of one process: hidden states, attention, noise of routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.core.run_spec import ModelSpec

STEPS, LENGTH = 3, 29  # padded to 32
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}  # drops 0.1 everywhere
OPT: dict[str, Any] = {
    "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.1,
    "attention_dropout": 0.1, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "gpt2": ModelSpec(type="gpt2", config=GPT2),
    "gpt2, eager": ModelSpec(type="gpt2", config=GPT2, attention="eager"),
    "hidden states alone": ModelSpec(type="gpt2", config={**GPT2, "attn_pdrop": 0.0}),
    "opt": ModelSpec(type="opt", config=OPT),  # flattens tokens
    "llama": ModelSpec(type="llama", config={**_SIZES, "attention_dropout": 0.2}),
    "gemma3_text": ModelSpec(  # windows
        type="gemma3_text",
        config={
            **_SIZES, "head_dim": 8, "sliding_window": 7, "attention_dropout": 0.2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": ModelSpec(  # sinks
        type="gpt_oss",
        attention="eager",
        config={
            **_SIZES, "head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2,
            "attention_dropout": 0.2, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ModelSpec(  # its router's noise
        type="mixtral",
        config={**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3},
    ),
}  # fmt: skip
CP2: dict[str, Any] = {"mesh": {"cp": 2}}
CP4: dict[str, Any] = {"mesh": {"cp": 4}}
ULYSSES, CONTIGUOUS, RING = {"attention": "ulysses"}, {"split": "contiguous"}, {"attention": "ring"}
FULL: dict[str, Any] = {"activations": {"policy": "full"}, "pipeline": {"microbatches": 2}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "alone": CP2,
        "contiguous": {**CP2, "context_parallel": CONTIGUOUS},
        "ulysses": {**CP2, "context_parallel": ULYSSES},
        "ulysses, contiguous, ZeRO-3": {
            **CP2, "context_parallel": {**ULYSSES, **CONTIGUOUS}, "data_parallel": {"zero": 3},
        },
        "recompute, ZeRO-3": {**CP2, **FULL, "data_parallel": {"zero": 3}},
        "ulysses, recompute": {**CP2, **FULL, "context_parallel": ULYSSES},
        "selective": {**CP2, "activations": {"policy": "selective"}, "pipeline": {"microbatches": 4}},
    },
    4: {
        "cp 4": CP4,
        "cp 4, contiguous": {**CP4, "context_parallel": CONTIGUOUS},
        "cp 4, ulysses": {**CP4, "context_parallel": ULYSSES},
        "ZeRO-3": {"mesh": {"cp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "HSDP, recompute": {"mesh": {"cp": 2, "dp_replicate": 2}, "data_parallel": {"zero": 3}, **FULL},
        "tp": {"mesh": {"cp": 2, "tp": 2}},
        "tp, ulysses, recompute": {"mesh": {"cp": 2, "tp": 2}, "context_parallel": ULYSSES, **FULL},
        "tp without sequence parallel": {
            "mesh": {"cp": 2, "tp": 2}, "tensor_parallel": {"sequence_parallel": False},
        },
        "pp": {"mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}},
        "pp, ulysses, ZeRO-1": {
            "mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}, "data_parallel": {"zero": 1},
            "context_parallel": ULYSSES,
        },
    },
}  # fmt: skip
OF_RINGS: dict[str, dict[str, Any]] = {
    "ring": {**CP2, "context_parallel": RING},
    "ring, contiguous, recompute": {**CP2, "context_parallel": {**RING, **CONTIGUOUS}, **FULL},
}


def batch_of(step: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, 250, (8, length + 1), generator=generator)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].clone()}
    batch["labels"][torch.rand(8, length, generator=generator) < 0.1] = -100
    return batch


def curves(
    _rank: int, _world: int, family: str, plans: dict[str, dict[str, Any]], length: int
) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name, plan in plans.items():
        with build_engine(FAMILIES[family], plan) as engine:
            records = [engine.step(engine.share_of(batch_of(step, length))) for step in range(STEPS)]
            found[name] = [(record.loss, record.grad_norm) for record in records]
    dist.barrier()
    return found


def require_same_curves(family: str, plans: dict[str, dict[str, Any]], world: int, length: int = LENGTH) -> None:
    per_rank = run_ranks(curves, world, family, plans, length, timeout_s=240.0)
    expected = run_ranks(curves, 1, family, {"one": {}}, length)[0]["one"]
    assert all(found == per_rank[0] for found in per_rank), "ranks disagree about their own curve"
    wrong = {name: found for name, found in per_rank[0].items() if not are_equal(found, expected)}
    assert wrong == {}, f"not {expected}"


def are_equal(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> bool:
    return all(
        abs(loss - value) <= SAME_CURVE_LOSS_ABS and abs(norm - other) <= SAME_CURVE_NORM_REL * norm
        for (loss, norm), (value, other) in zip(expected, found, strict=True)
    )


FAST = ("recompute, ZeRO-3", "ulysses, contiguous, ZeRO-3")
CASES = by_default(
    [],
    [(family, world) for family in FAMILIES for world in LAYOUTS if family != "mixtral"],
    extended=[("gpt2", 2), ("opt", 4)],
)


def test_dropout_by_global_position_has_the_curve_of_one_process() -> None:
    require_same_curves("gpt2", {name: LAYOUTS[2][name] for name in FAST}, 2)


@pytest.mark.parametrize(("family", "world"), CASES)
def test_dropout_has_the_masks_of_one_process(family: str, world: int) -> None:
    require_same_curves(family, LAYOUTS[world], world)


@pytest.mark.extended
def test_hidden_states_drop_alike_beside_a_ring() -> None:
    require_same_curves("hidden states alone", OF_RINGS, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_a_routers_noise_is_that_of_one_process(world: int) -> None:
    plans = {name: plan for name, plan in LAYOUTS[world].items() if "pp" not in plan["mesh"]}
    require_same_curves("mixtral", plans, world, length=32)  # a mixture would route padding
