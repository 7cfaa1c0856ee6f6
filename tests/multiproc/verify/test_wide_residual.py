"""A float32 residual stream is verified against one process, whose stream is wide by hooks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import BF16_SAME_LOSS_ABS
from verify_ranks import small_run, verdicts_in_rank

WIDE = {"preset": "bf16", "residual": "float32"}
PLANS: list[dict[str, Any]] = [
    {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}},
    {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}, "pipeline": {"microbatches": 2}},
    {"mesh": {"tp": 2}, "activations": {"policy": "full"}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
    {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4, "schedule": "zero_bubble"}, "activations": {"policy": "full"}},
]
EXPERTS: dict[str, Any] = {
    "mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
def test_a_wide_stream_is_verified(model: str, corpus: Path, tmp_path: Path) -> None:
    plans = [{**plan, "precision": WIDE} for plan in (PLANS if model == "llama" else PLANS[:2])]
    plans += [{**EXPERTS, "precision": WIDE}] if model == "mixtral" else []
    # slow updates: else one choice between nearly equal experts sends a later step's tokens elsewhere
    run = small_run(str(corpus), model=model, train={"learning_rate": 1e-3} if model == "mixtral" else None)
    for verdict in run_ranks(verdicts_in_rank, 2, run, plans, str(tmp_path), timeout_s=600)[0]:
        wrong = [f"{check['name']}: {check['detail']}" for check in verdict["checks"] if not check["ok"]]
        assert not wrong


def losses(rank: int, world: int) -> dict[str, Any]:
    found = {}
    layouts = {"one": {}, "tp": {"mesh": {"tp": 2}}, "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}}
    for name, layout in layouts.items():
        if (name == "one") == (world == 1):
            engine = build_engine("llama", {"precision": WIDE, **layout})
            records = [loss for loss, _ in train_steps(engine, 2)]
            found[name] = records, {row.component: row.found for row in engine.dtypes()}["residual"]
    return found


def test_a_wide_stream_over_tensor_parallel_ranks_and_stages() -> None:
    single = run_ranks(losses, 1)[0]["one"]
    for name, (found, residual) in run_ranks(losses, 2, timeout_s=200.0)[0].items():
        assert found == pytest.approx(single[0], abs=BF16_SAME_LOSS_ABS), name
        assert set(residual) == {"float32"}, name
