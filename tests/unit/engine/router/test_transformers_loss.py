"""`balance_over = "transformers"` is the loss that transformers itself computes with `output_router_logits`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import build_engine, global_batch
from transformers import AutoModelForCausalLM

from weft.core.errors import NotBuiltError
from weft.core.run_spec import ModelSpec, RouterSpec
from weft.models.build import build_config

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "qwen3_moe": {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
}
COEFFICIENT = 0.5
CLOSE = 2e-6  # relative to the largest element, float32


def engine_of(family: str, plan: dict[str, Any]) -> Any:
    spec = RouterSpec(balance_loss=COEFFICIENT, balance_over="transformers")
    return build_engine(ModelSpec(type=family, config=FAMILIES[family]), plan, router=spec, clip_norm=0.0)


def expected(family: str, weights: dict[str, torch.Tensor], microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean of transformers' router losses, and the gradients of the total loss."""
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=257)
    model = AutoModelForCausalLM.from_config(config).train()
    model.load_state_dict(weights)
    batch, losses = global_batch(0), []
    count = (batch["labels"] != -100).sum()
    for tokens, labels in zip(*(batch[key].chunk(microbatches) for key in ("input_ids", "labels")), strict=True):
        found = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        own = F.cross_entropy(found.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (own / count + COEFFICIENT * found.aux_loss / microbatches).backward()
        losses.append(found.aux_loss.item())
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return sum(losses) / microbatches, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "plan",
    [{}, {"activations": {"policy": "full"}}, {"pipeline": {"microbatches": 2}}],
    ids=["one micro-batch", "recompute", "two micro-batches"],
)
def test_value_and_gradients_are_those_of_transformers(family: str, plan: dict[str, Any]) -> None:
    engine, gradients = engine_of(family, plan), {}
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    engine.on_gradients = lambda found: gradients.update({name: value.clone() for name, value in found.items()})
    record = engine.step(global_batch(0))
    microbatches = plan.get("pipeline", {}).get("microbatches", 1)
    value, right = expected(family, weights, microbatches)
    if microbatches == 1:
        assert record.router_balance_loss == pytest.approx(value, rel=1e-6)
    assert gradients.keys() == right.keys()
    wrong = {
        name: float((gradients[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-9))
        for name, grad in right.items()
    }
    assert {name: error for name, error in wrong.items() if not error < CLOSE} == {}


def test_the_loss_reaches_the_routers() -> None:
    """Without it their gradients are others, so the comparison means something."""
    norms = []
    for coefficient in (0.0, COEFFICIENT):
        spec = RouterSpec(balance_loss=coefficient, balance_over="transformers", z_loss=1e-9)
        engine = build_engine(ModelSpec(type="mixtral", config=FAMILIES["mixtral"]), router=spec)
        engine.on_gradients = lambda found: norms.append(float(found["model.layers.0.mlp.gate.weight"].norm()))
        engine.step(global_batch(0))
    assert abs(norms[1] - norms[0]) > 0.05 * norms[0]


@pytest.mark.parametrize(
    ("plan", "words", "hint"),
    [
        ({"mesh": {"pp": 2}}, "the choices of all layers", "mesh.pp = 1"),
        ({"mesh": {"tp": 2}}, "of full sequences", "sequence_parallel = false"),
        ({"compile": {"enabled": True}}, "in compiled blocks", "compile.enabled = false"),
    ],
)
def test_layouts_that_cannot_compute_it_are_refused(plan: dict[str, Any], words: str, hint: str) -> None:
    from weft.core.plan import Plan
    from weft.engine.router.apply import find_and_build

    spec = RouterSpec(balance_loss=COEFFICIENT, balance_over="transformers")
    with pytest.raises(NotBuiltError, match=words) as refused:
        find_and_build(torch.nn.Module(), Plan.from_tables(plan), spec, device=torch.device("cpu"))
    assert hint in refused.value.hint
