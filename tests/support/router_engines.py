"""Engines over tiny mixtures of experts with router losses, the layouts to compare, and the comparison. For tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import global_batch

from weft.core.plan import Plan
from weft.core.router_rules import check_router
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.state import as_shard
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.verify.evidence import full_tensor

CPU = torch.device("cpu")
STEPS, RATE = 3, 0.1  # sgd: adam's first steps amplify rounding
_BASE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_BASE, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": {**_BASE, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v3": {
        **_BASE, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
# all is float64 but the loss, and the routers of two families
BOUNDS = {"gpt_oss": 1e-6, "qwen3_moe": 2e-5, "deepseek_v3": 2e-5}
SPECS = {
    "gpt_oss": RouterSpec(balance_loss=0.3, z_loss=0.05),
    "qwen3_moe": RouterSpec(balance_loss=0.3, z_loss=0.05),
    "deepseek_v3": RouterSpec(balance_loss=0.3, z_loss=0.05, bias_rate=0.01),
}
CAPACITY = 0.75  # a factor at which experts of every family drop choices
_FOUR = {"pipeline": {"microbatches": 4}}
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "alone": {},
        "micro-batches": _FOUR,
        "recompute": {**_FOUR, "activations": {"policy": "full"}},
        "selective": {"activations": {"policy": "selective"}},
    },
    2: {
        "DDP": {"mesh": {"dp_replicate": 2}, **_FOUR},
        "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        "ZeRO-2, recompute": {
            "mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, "activations": {"policy": "full"}, **_FOUR,
        },
        "tp": {"mesh": {"tp": 2}},
        "tp, full sequences": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}},
        "tp, sequence parallel": {
            "mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}, "activations": {"policy": "full"},
        },
        "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
        "pp, zero bubble": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4}},
        "ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
        "ep, recompute": {
            "mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 1}, "activations": {"policy": "full"}, **_FOUR,
        },
    },
    4: {
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "dp and tp": {"mesh": {"dp_replicate": 2, "tp": 2}, **_FOUR},
    },
}  # fmt: skip
Found = dict[str, Any]


def skeleton(family: str) -> Any:
    model = build_skeleton(build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=257))
    model.set_experts_implementation("eager")  # grouped kernels have no float64
    return model.double()


def build(family: str, tables: dict[str, Any], spec: RouterSpec) -> Engine:
    source = skeleton(family)
    return Engine(
        skeleton(family),
        Plan.from_tables(tables),
        optimizer=OptimizerPolicy(kind="sgd", learning_rate=RATE, momentum=0.9, weight_decay=0.0),
        weights=InitialWeights(source, describe(source), seed=0, device=CPU),
        clip_norm=0.0,
        router=spec,
        device=CPU,
    )


def trained(engine: Engine) -> Found:
    """Gradients, losses, figures and biases of every step, of this rank's stages."""
    steps: list[dict[str, torch.Tensor]] = []

    def keep(gradients: dict[str, torch.Tensor]) -> None:
        found = {
            name: full_tensor(as_shard(value.detach(), engine.shards.get(name)), engine)
            for name, value in gradients.items()
        }
        steps.append(found)

    engine.on_gradients = keep
    records = [engine.step(engine.share_of(global_batch(step))) for step in range(STEPS)]
    figures = ("expert_load", "expert_load_max", "expert_entropy", "dead_experts", "dropped_share")
    biases = {name: value.tolist() for name, value in engine.model.named_buffers() if name.endswith("correction_bias")}
    return {
        "losses": [record.loss for record in records],
        "figures": [[getattr(record, name) or 0.0 for name in figures] for record in records],
        "terms": [[record.router_balance_loss, record.router_z_loss] for record in records],
        "gradients": steps,
        "biases": biases,
        "choices": engine.scalars()["router"],
    }


def plans_for(world: int, changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Plans that can train with these keys of [router]."""
    spec = RouterSpec(**changes)
    return {name: plan for name, plan in PLANS[world].items() if not list(check_router(Plan.from_tables(plan), spec))}


def runs(rank: int, world: int, family: str, changes: dict[str, Any] | None = None) -> dict[str, Found]:
    changes = changes or {}
    spec = SPECS[family].model_copy(update=changes)
    found = {}
    for name, tables in plans_for(world, changes).items():
        with build(family, tables, spec) as engine:
            found[name] = trained(engine)
    return found


def over_ranks(per_rank: list[dict[str, Found]], name: str) -> Found:
    """One layout's values: gradients and biases of all stages."""
    every = [found[name] for found in per_rank]
    for other in every[1:]:
        for key in ("losses", "figures", "terms", "choices"):
            assert other[key] == every[0][key], (name, key)
    gradients = [
        {key: value for one in every for key, value in one["gradients"][step].items()} for step in range(STEPS)
    ]
    biases = {key: value for one in every for key, value in one["biases"].items()}
    return {**every[0], "gradients": gradients, "biases": biases}


def check_same(expected: Found, found: Found, what: str, *, bound: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), what
    assert found["choices"] == expected["choices"], what
    for mine, other in zip(found["figures"] + found["terms"], expected["figures"] + expected["terms"], strict=True):
        assert mine == pytest.approx(other, rel=1e-5), what
    for step, right in enumerate(expected["gradients"]):
        wrong = {key: error(found["gradients"][step].get(key), value) for key, value in right.items()}
        assert {key: value for key, value in wrong.items() if not value < bound} == {}, (what, step)
    assert {key: found["biases"][key] for key in expected["biases"]} == expected["biases"], what


def error(value: torch.Tensor | None, right: torch.Tensor) -> float:
    value = torch.zeros_like(right) if value is None else value
    return float((value - right).abs().max() / right.abs().max().clamp_min(1e-9))
