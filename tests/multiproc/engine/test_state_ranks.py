"""Engine.save on one layout, Engine.load on others: every tensor bitwise, 8-bit moments included; 8-bit runs agree."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from narrow import Narrow
from tiny import CPU, build_engine, train_steps
from tolerances import LOWBIT_SAME_LOSS_ABS, SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL
from torch import nn
from torch.distributed.tensor import DTensor

from weft.core.errors import CheckpointError
from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import Kind, OptimizerPolicy

KINDS: tuple[Kind, ...] = ("adamw", "sgd", "adamw8bit")


def narrow(world: int, kind: Kind, *, microbatches: int = 1) -> Engine:
    torch.manual_seed(0)
    tables: dict[str, Any] = {"pipeline": {"microbatches": microbatches}}
    if world > 1:
        tables |= {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}}
    policy = OptimizerPolicy(kind=kind, learning_rate=1e-3)
    return Engine(Narrow(), Plan.from_tables(tables), optimizer=policy, device=CPU)


def digests(engine: Engine) -> dict[str, str]:
    found = {}
    for name, tensor in engine.state().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = f"{tuple(whole.shape)} {hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()}"
    return found


def save(rank: int, world: int, folder: str) -> dict[str, dict[str, str]]:
    found = {}
    for kind in KINDS:
        engine = narrow(world, kind)
        train_steps(engine, 3)
        engine.save(Path(folder) / kind)
        found[kind] = digests(engine)
    return found


Loaded = dict[str, tuple[int, dict[str, str], list[tuple[float, float]]]]


def load(rank: int, world: int, folder: str) -> Loaded:
    found: Loaded = {}
    for kind in KINDS:
        engine = narrow(world, kind)
        step = engine.load(Path(folder) / kind)
        assert engine.steps_done == step
        state = digests(engine)
        found[kind] = step, state, train_steps(engine, 2, first=3)
    return found


def test_a_checkpoint_is_the_same_bits_on_any_layout(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, str(tmp_path))[0]
    eightbit = expected["adamw8bit"]
    assert "optim.head.weight.exp_avg.codes" in eightbit
    assert "optim.long.exp_avg_sq.scales" in eightbit
    curves = {}
    for world in (1, 2, 4):
        answers = run_ranks(load, world, str(tmp_path))
        assert all(answer == answers[0] for answer in answers)
        for kind, (step, state, curve) in answers[0].items():
            assert step == 3
            assert state == expected[kind], (kind, world)
            reference = curves.setdefault(kind, curve)
            bound = LOWBIT_SAME_LOSS_ABS if kind == "adamw8bit" else SAME_CURVE_LOSS_ABS
            assert [a for a, _ in curve] == pytest.approx([a for a, _ in reference], abs=bound), (kind, world)


def refused(rank: int, world: int, folder: str) -> tuple[str, str]:
    engine = narrow(world, "adamw")
    engine.save(folder)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        build_engine("llama", {"mesh": {"dp_shard": world}}).load(folder)
    return caught.value.code, str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == second
    assert first[0] == "W601"


def eightbit_curve(rank: int, world: int) -> list[tuple[float, float]]:
    return train_steps(narrow(world, "adamw8bit"), 8)


def test_8_bit_adamw_is_one_run_at_any_degree() -> None:
    expected = run_ranks(eightbit_curve, 1)[0]
    for world in (2, 4):
        found = run_ranks(eightbit_curve, world)[0]
        assert [a for a, _ in found] == pytest.approx([a for a, _ in expected], abs=LOWBIT_SAME_LOSS_ABS)


def others(rank: int, world: int) -> dict[str, list[tuple[float, float]]]:
    """Experts, and dropout over data-parallel ranks, in the same ranks."""
    sharded = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}} if world == 2 else {}
    replicated = {"mesh": {"dp_replicate": 2}} if world == 2 else {}
    return {
        "mixtral": train_steps(build_engine("mixtral", sharded), 6),
        "gpt2": train_steps(build_engine("gpt2", {**replicated, "pipeline": {"microbatches": 2}}), 6),
    }


def test_experts_and_dropout_have_the_curve_of_one_process() -> None:
    expected, found = run_ranks(others, 1)[0], run_ranks(others, 2)[0]
    for name, curve in expected.items():
        for (loss, norm), (other_loss, other_norm) in zip(curve, found[name], strict=True):
            assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS), name
            assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL), name


class Branches(nn.Module):
    """A branch that no step takes, and one that only rank 0's rows take part in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def unused(rank: int, world: int, folder: str) -> dict[str, tuple[list[tuple[float, float]], bool]]:
    plans: dict[str, dict[str, Any]] = {"single": {}}
    if world == 2:
        plans = {
            "DDP": {"mesh": {"dp_replicate": 2}, "data_parallel": {"find_unused_parameters": True}},
            "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
            "ZeRO-1": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}},
        }
    found = {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        tables = {**plan, "pipeline": {"microbatches": 2}}
        engine = Engine(Branches(), Plan.from_tables(tables), optimizer=OptimizerPolicy(weight_decay=0.0), device=CPU)
        before = engine.model.get_parameter("never.weight").detach().clone()
        curve = train_steps(engine, 2)
        engine.save(Path(folder) / f"{name}-{world}")  # in mid-run: must not touch the moments of the others
        curve += train_steps(engine, 2, first=2)
        after = engine.model.get_parameter("never.weight").detach()
        found[name] = curve, bool((after == before).all())
    return found


def test_a_branch_without_gradients_trains_and_saves_everywhere(tmp_path: Path) -> None:
    expected = run_ranks(unused, 1, str(tmp_path))[0]["single"]
    for name, (curve, is_unmoved) in run_ranks(unused, 2, str(tmp_path))[0].items():
        assert is_unmoved, name
        assert [a for a, _ in curve] == pytest.approx([a for a, _ in expected[0]], abs=SAME_CURVE_LOSS_ABS), name
        assert [b for _, b in curve] == pytest.approx([b for _, b in expected[0]], rel=SAME_CURVE_NORM_REL), name
