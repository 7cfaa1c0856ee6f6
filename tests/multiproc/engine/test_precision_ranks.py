"""bf16 and fp16 over ranks: the same run under every strategy, the dtypes asked for, overflows skipped by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny import CPU, build_engine, global_batch, train_steps
from tolerances import BF16_LOSS_ABS, BF16_SAME_LOSS_ABS
from torch import nn

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.objective import Batch, CausalLanguageModel

STEPS = 10
PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}},
    **{f"ZeRO-{z}": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": z}} for z in (1, 2, 3)},
}
Found = dict[str, tuple[list[float], list[tuple[str, bool, tuple[str, ...]]]]]


def curves(rank: int, world: int, preset: str) -> Found:
    found: Found = {}
    plans = PLANS if world > 1 else {"single": {}}
    for name, plan in plans.items():
        tables = {**plan, "precision": {"preset": preset}, "pipeline": {"microbatches": 2}}
        engine = build_engine("llama", tables)
        losses = [loss for loss, _ in train_steps(engine, STEPS)]
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        found[name] = losses, [(row.component, row.ok, row.found) for row in engine.dtypes()]
    return found


def test_bf16_is_one_run_under_every_strategy() -> None:
    expected, _ = run_ranks(curves, 1, "bf16")[0]["single"]
    exact, _ = run_ranks(curves, 1, "fp32")[0]["single"]
    per_rank = run_ranks(curves, 2, "bf16", timeout_s=120.0)
    assert per_rank[0] == per_rank[1]
    for name, (losses, rows) in per_rank[0].items():
        assert losses == pytest.approx(expected, abs=BF16_SAME_LOSS_ABS), name
        assert losses == pytest.approx(exact, abs=BF16_LOSS_ABS), name
        table = {component: seen for component, _, seen in rows}
        assert all(ok for _, ok, _ in rows), (name, rows)
        assert table["weights"] == table["activations"] == ("bfloat16",)
        assert table["reduce"] == table["gradients"] == table["master_weights"] == ("float32",)
    assert exact != expected


def low_curves(rank: int, world: int) -> dict[tuple[str, str], tuple[list[float], list[Any]]]:
    """Of states, and then weights too, at rest in bfloat16."""
    found = {}
    for master in ("float32", "bfloat16"):
        precision = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": master}
        for name in ("DDP", "ZeRO-2", "ZeRO-3") if world > 1 else ("single",):
            engine = build_engine("llama", {**PLANS.get(name, {}), "precision": precision})
            losses = [loss for loss, _ in train_steps(engine, 4)]
            found[master, name] = (
                losses,
                [(row.component, row.asked, row.found) for row in engine.dtypes() if not row.ok],
            )
    return found


@pytest.mark.extended
def test_states_and_weights_in_bfloat16_are_one_run_under_every_strategy() -> None:
    """Rounded by the element's place in the whole: shards have the bits of replicas, and no other."""
    single, per_rank = run_ranks(low_curves, 1)[0], run_ranks(low_curves, 2, timeout_s=120.0)
    assert per_rank[0] == per_rank[1]
    for (master, name), (losses, wrong) in per_rank[0].items():
        assert not wrong, (master, name)
        assert losses == per_rank[0][master, "DDP"][0], (master, name)
        assert losses == pytest.approx(single[master, "single"][0], abs=BF16_SAME_LOSS_ABS), (master, name)


class Loud(CausalLanguageModel):
    """Rank 1's loss explodes in step 2: its float16 gradients overflow, the other rank's do not."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        factor = 1e7 if self.rank == 1 and self.calls == 2 else 1.0
        return super().loss_sum(model, batch) * factor


def overflows(rank: int, world: int) -> dict[str, list[tuple[bool, float | None, float]]]:
    return {name: overflow(rank, plan) for name, plan in PLANS.items()}


def overflow(rank: int, plan: dict[str, Any]) -> list[tuple[bool, float | None, float]]:
    engine = build_engine("llama", {**plan, "precision": {"preset": "fp16"}}, objective=Loud(rank))
    seen = []
    for step in range(3):
        record = engine.step(engine.share_of(global_batch(step)))
        total = sum(p.detach().double().sum().item() for p in engine.model.parameters() if plan == PLANS["DDP"])
        seen.append((record.skipped, record.loss_scale, total))
    restored = build_engine("llama", {**plan, "precision": {"preset": "fp16"}})
    restored.restore_scalars(engine.scalars())
    assert (restored.loss_scale.value, restored.loss_scale.good_steps) == (2.0**15, 1)
    return seen


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    first, second = run_ranks(overflows, 2)
    assert first == second
    for name, seen in first.items():
        scales = [(skipped, scale) for skipped, scale, _ in seen]
        assert scales == [(False, 2.0**16), (True, 2.0**15), (False, 2.0**15)], name
    sums = [total for _, _, total in first["DDP"]]
    assert sums[1] == sums[0] != sums[2]  # the skipped step moved nothing


class Linear:
    """loss = sum of outputs: the gradient of the weight is the sum of the inputs."""

    def weight(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(0.5)  # one in all, over two ranks

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"]).float().sum()


def small_gradients(rank: int, world: int) -> dict[str, float]:
    rows = 257
    x = torch.full((rows, 2), 2.0**-8)
    x[0] = 1.0
    norms = {}
    for name, plan in PLANS.items():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        nn.init.eye_(model[0].weight)
        nn.init.ones_(model[1].weight)
        tables = {**plan, "precision": {"preset": "bf16"}, "pipeline": {"microbatches": rows}}
        engine = Engine(model, Plan.from_tables(tables), objective=Linear(), device=CPU, clip_norm=0.0)
        norms[name] = engine.step({"x": x}).grad_norm
    return norms


@pytest.mark.slow
def test_small_gradients_survive_many_micro_batches_in_every_strategy() -> None:
    """Each entry sums 1 + 256/256 on each of two ranks; in bfloat16 the 256 small ones would all be lost."""
    expected = 4.0 * 6**0.5  # four entries of the first layer and two of the second
    for norms in run_ranks(small_gradients, 2, timeout_s=120.0):
        for name, norm in norms.items():
            assert norm == pytest.approx(expected), name


COMPONENTS = {"preset": "bf16", "gradients": "bfloat16", "second_moment": "bfloat16", "logits": "float32"}
LAYOUTS: dict[str, dict[str, Any]] = {**PLANS, "pipeline": {"mesh": {"pp": 2}}}  # tp refuses these logits


def component_curves(rank: int, world: int) -> Found:
    found: Found = {}
    for name, plan in LAYOUTS.items() if world > 1 else [("single", {})]:
        # own gradients of several micro-batches are refused where they are sharded
        microbatches = 1 if plan.get("data_parallel", {}).get("zero", 0) >= 2 else 2
        engine = build_engine("llama", {**plan, "precision": COMPONENTS, "pipeline": {"microbatches": microbatches}})
        losses = [loss for loss, _ in train_steps(engine, 3)]
        found[name] = losses, [(row.component, row.ok, row.found) for row in engine.dtypes()]
    return found


@pytest.mark.extended
def test_components_are_one_run_under_every_layout() -> None:
    expected, _ = run_ranks(component_curves, 1)[0]["single"]
    for rank in run_ranks(component_curves, 2, timeout_s=300.0):
        for name, (losses, rows) in rank.items():
            assert losses == pytest.approx(expected, abs=BF16_SAME_LOSS_ABS), name
            table = {component: seen for component, _, seen in rows}
            assert all(ok for _, ok, _ in rows), (name, rows)
            assert table["gradients"] == table["second_moment"] == ("bfloat16",), name
            assert table["master_weights"] == table["first_moment"] == ("float32",), name
            if name.startswith("ZeRO"):
                assert table["gather"] == ("bfloat16",), name
