"""Losses of routers, load of experts and bias of the choice: every layout has those of one process.

The process itself is checked against a plain loop, which writes the losses out and shares no code with the engine.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import run_ranks
from samples import by_default
from tiny import global_batch

import weft.engine.engine as engine_module
from weft.core.plan import Plan
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
        "tp, sequence parallel": {
            "mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}, "activations": {"policy": "full"},
        },
        "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
        "pp, zero bubble": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4}},
        "ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
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
    with mock.patch.object(engine_module, "require_executable"):  # a plan with mesh.ep is refused until all of it works
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
    figures = ("expert_load", "expert_load_max", "expert_entropy", "dead_experts")
    biases = {name: value.tolist() for name, value in engine.model.named_buffers() if name.endswith("correction_bias")}
    return {
        "losses": [record.loss for record in records],
        "figures": [[getattr(record, name) for name in figures] for record in records],
        "terms": [[record.router_balance_loss, record.router_z_loss] for record in records],
        "gradients": steps,
        "biases": biases,
        "choices": engine.scalars()["router"],
    }


def runs(rank: int, world: int, family: str, over: str = "batch") -> dict[str, Found]:
    spec = SPECS[family].model_copy(update={"balance_over": over})
    found = {}
    for name, tables in PLANS[world].items():
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
        wrong = {key: _error(found["gradients"][step].get(key), value) for key, value in right.items()}
        assert {key: error for key, error in wrong.items() if not error < bound} == {}, (what, step)
    assert {key: found["biases"][key] for key in expected["biases"]} == expected["biases"], what


def _error(value: torch.Tensor | None, right: torch.Tensor) -> float:
    value = torch.zeros_like(right) if value is None else value
    return float((value - right).abs().max() / right.abs().max().clamp_min(1e-9))


@pytest.mark.parametrize("family", by_default(["gpt_oss", "deepseek_v3"], list(FAMILIES)))
def test_every_layout_has_the_gradients_of_one_process(family: str) -> None:
    alone = run_ranks(runs, 1, family, timeout_s=120.0)
    expected = over_ranks(alone, "alone")
    for world in PLANS:
        per_rank = alone if world == 1 else run_ranks(runs, world, family, timeout_s=240.0)
        for name in PLANS[world]:
            if (family, name) == ("gpt_oss", "ep"):
                continue  # its parallel layout is checked with the other families
            check_same(expected, over_ranks(per_rank, name), f"{family} under {name}", bound=BOUNDS[family])
    assert any(load > 1 for load, *_ in expected["figures"])


# --- one process against a plain loop -------------------------------------------------------------------------------


def plain_gradients(family: str) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Gradients of each step by autograd on the losses as the documentation writes them."""
    spec = SPECS[family]
    with build(family, {}, RouterSpec()) as engine:
        model = engine.model
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    routers = [m for name, m in model.named_modules() if name.endswith((".router", ".gate")) and hasattr(m, "top_k")]
    shares: list[torch.Tensor | None] = [None] * len(routers)
    found, balances = [], []
    for step in range(STEPS):
        seen: list[Any] = []
        handles = [router.register_forward_hook(lambda _m, _a, output: seen.append(output)) for router in routers]
        batch = global_batch(step)
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        for handle in handles:
            handle.remove()
        weight = (batch["labels"] != -100).sum()
        loss = (
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
            / weight
        )
        values = []
        for place, (scores, _, index) in enumerate(seen):
            wide = scores.flatten(0, -2).double()
            num_experts = wide.shape[-1]
            p = wide.sigmoid() / wide.sigmoid().sum(-1, keepdim=True) if family == "deepseek_v3" else wide.softmax(-1)
            counts = torch.bincount(index.flatten(), minlength=num_experts).double()
            own, before = counts / counts.sum(), shares[place]
            f = torch.full_like(own, 1 / num_experts) if before is None else before
            loss = loss + spec.balance_loss * num_experts * (f * p.mean(0)).sum()
            loss = loss + spec.z_loss * wide.logsumexp(-1).square().mean()
            values.append(float(num_experts * (own * p.mean(0)).sum()))
            shares[place] = own
            if spec.bias_rate:
                routers[place].e_score_correction_bias.add_(spec.bias_rate * torch.sign(counts.mean() - counts))
        balances.append(sum(values) / len(values))
        optimizer.zero_grad()
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found, balances


def compare_plain(rank: int, world: int, family: str) -> tuple[dict[str, float], list[float], list[float]]:
    with build(family, {}, SPECS[family]) as engine:
        mine = trained(engine)
    right, balances = plain_gradients(family)
    worst = {
        f"{name} of step {step}": _error(mine["gradients"][step].get(name), value)
        for step in range(STEPS)
        for name, value in right[step].items()
    }
    return worst, [balance for balance, _ in mine["terms"]], balances


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_has_the_gradients_of_the_written_losses(family: str) -> None:
    worst, mine, right = run_ranks(compare_plain, 1, family)[0]
    assert {name: error for name, error in worst.items() if not error < BOUNDS[family]} == {}
    assert mine == pytest.approx(right, rel=1e-6)
