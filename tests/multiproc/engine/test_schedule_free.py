"""Schedule-free AdamW has the curve, and the average, of the formula on full tensors in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from schedule_free import POLICY, RATES, plain_curve
from tiny import build_engine, global_batch
from tolerances import SAME_CURVE_LOSS_ABS

from weft.engine.ownership import local

ACCUMULATED = {"pipeline": {"microbatches": 2}}
OF_TWO: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}, **ACCUMULATED},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, **ACCUMULATED},
    "ZeRO-2": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, **ACCUMULATED},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4, "schedule": "1f1b"}},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {"ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}}}
FAMILIES_OF = {"qwen3-tied": OF_TWO, "llama": OF_TWO, "mixtral": OF_EXPERTS}


def curve(family: str, plan: dict[str, Any], scratch: str) -> tuple[list[float], float]:
    """The losses of the steps, the last two of them after a resume, and the loss at the average."""
    found = []
    for part in (range(3), range(3, len(RATES))):
        with build_engine(family, plan, optimizer=POLICY) as engine:
            if part.start:
                engine.load(scratch)
            found += [engine.step(engine.share_of(global_batch(at)), learning_rate=RATES[at]).loss for at in part]
            if not part.start:
                engine.save(scratch)
                continue
            before = {name: local(value.detach()).clone() for name, value in engine.trained.items()}
            with engine.average_weights():
                evaluation = engine.evaluate(engine.share_of(global_batch(len(RATES)))).loss
            assert all(torch.equal(before[name], local(value.detach())) for name, value in engine.trained.items())
    return found, evaluation


def curves(_rank: int, _world: int, family: str, names: list[str], scratch: str) -> dict[str, Any]:
    plans = {"one": {}, **FAMILIES_OF[family]}
    found = {}
    for name in names:
        found[name] = curve(family, plans[name], f"{scratch}/{name}")
        dist.barrier()
    return found


def plain(_rank: int, _world: int, family: str) -> tuple[list[float], float]:
    with build_engine(family) as engine:
        losses, _, evaluation = plain_curve(engine.model)
    return losses, evaluation


def require_same(family: str, names: list[str], scratch: Path) -> None:
    losses, evaluation = run_ranks(plain, 1, family)[0]
    found = run_ranks(curves, 1, family, ["one"], str(scratch / "one"))[0]
    found |= run_ranks(curves, 2, family, names, str(scratch / "two"), timeout_s=240.0)[0]
    for name, (own, at_average) in found.items():
        worst = max(abs(one - other) for one, other in zip(losses, own, strict=True))
        assert worst <= SAME_CURVE_LOSS_ABS, f"{family} under {name}: losses differ by {worst:.1e}"
        assert abs(at_average - evaluation) <= SAME_CURVE_LOSS_ABS, f"{family} under {name}: at the average"
    assert abs(evaluation - losses[-1]) > 1e-3


def test_schedule_free_has_the_curve_of_the_formula(tmp_path: Path) -> None:
    require_same("qwen3-tied", ["ZeRO-3"], tmp_path)


@pytest.mark.parametrize("family", by_default([], FAMILIES_OF, extended=["qwen3-tied", "mixtral"]))
def test_every_layout(family: str, tmp_path: Path) -> None:
    require_same(family, list(FAMILIES_OF[family]), tmp_path)
