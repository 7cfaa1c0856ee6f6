"""precision.router = "float32": logits and choices of float32 in a bf16 model, in every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from router_engines import CPU, FAMILIES
from tiny import global_batch, train_steps

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.engine.engine import Engine
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

WIDE = {"precision": {"preset": "bf16", "router": "float32"}}
ZERO_3 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}}


def build(family: str, tables: dict[str, Any]) -> Engine:
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=257)
    source = build_skeleton(config)
    weights = InitialWeights(source, describe(source), seed=0, device=CPU)
    plan = Plan.from_tables(tables)
    return Engine(build_skeleton(config), plan, weights=weights, router=RouterSpec(z_loss=0.01), device=CPU)


NARROW = {"preset": "bf16", "router": "bfloat16"}


def logit_dtypes(rank: int, world: int, family: str, tables: dict[str, Any]) -> set[str]:
    engine, found = build(family, tables), set()
    for name, module in engine.model.named_modules():
        if name.endswith((".gate", ".router")) and hasattr(module, "top_k"):
            module.register_forward_hook(lambda _m, _a, out: found.add(str(out[0].dtype)))
    train_steps(engine, 1)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("world", "tables"), [(1, {}), (2, ZERO_3)], ids=["alone", "ZeRO-3"])
def test_logits_are_float32_and_the_rest_bf16(family: str, world: int, tables: dict[str, Any]) -> None:
    assert run_ranks(logit_dtypes, world, family, {**tables, **WIDE}, timeout_s=120.0) == [{"torch.float32"}] * world
    narrow = run_ranks(logit_dtypes, world, family, {**tables, "precision": NARROW}, timeout_s=120.0)
    assert narrow == [{"torch.bfloat16"}] * world


def output(rank: int, world: int) -> tuple[str, bool]:
    engine = build("qwen3_moe", WIDE)
    seen: list[torch.Tensor] = []
    block = engine.model.get_submodule(engine.layout.blocks[0])
    block.register_forward_hook(lambda _m, _a, out: seen.append(out if isinstance(out, torch.Tensor) else out[0]))
    gradients: dict[str, float] = {}
    engine.on_gradients = lambda found: gradients.update({name: float(value.norm()) for name, value in found.items()})
    engine.step(engine.share_of(global_batch(0)))
    return str(seen[0].dtype), gradients["model.layers.0.mlp.gate.weight"] > 0


def test_activations_stay_bf16_and_the_router_is_trained() -> None:
    assert run_ranks(output, 1)[0] == ("torch.bfloat16", True)
