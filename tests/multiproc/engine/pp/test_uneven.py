"""Rows that micro-batches do not divide: the first ones have one more, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

ROWS = 10
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4}},
    "zbv": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "microbatches": 4, "virtual_stages": 2}},
    "2bw": {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}},
    "DDP": {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 3}},
}


def course(plan: dict[str, Any]) -> tuple[list[tuple[float, float]], float]:
    """Steps with ten rows and with eight, so that shapes change from step to step; dropout is on."""
    engine = build_engine("gpt2-four", plan)
    records = []
    for step in range(3):
        batch = engine.share_of(global_batch(step, rows=ROWS if step % 2 == 0 else 8))
        records.append(engine.step(batch))
    told = [(record.loss, record.grad_norm) for record in records]
    return told, engine.evaluate(engine.share_of(global_batch(9, rows=ROWS))).loss


def courses(rank: int, world: int) -> dict[str, Any]:
    return {name: course(plan) for name, plan in PLANS.items()} if world > 1 else {"one": course({})}


def test_uneven_micro_batches_train_as_one_process() -> None:
    expected, held_out = run_ranks(courses, 1)[0]["one"]
    for found in run_ranks(courses, 2, timeout_s=120):
        for name, (told, evaluated) in found.items():
            losses, norms = np.transpose(told)
            if name != "2bw":  # the second step reads the first one's weights there
                np.testing.assert_allclose(
                    losses, [loss for loss, _ in expected], atol=SAME_CURVE_LOSS_ABS, err_msg=name
                )
                np.testing.assert_allclose(
                    norms, [norm for _, norm in expected], rtol=SAME_CURVE_NORM_REL, err_msg=name
                )
                np.testing.assert_allclose(evaluated, held_out, atol=SAME_CURVE_LOSS_ABS, err_msg=name)
            assert abs(losses[0] - expected[0][0]) < SAME_CURVE_LOSS_ABS, name
            if name == "2bw":
                assert norms[0] == 0
                np.testing.assert_allclose(norms[1], expected[0][1], rtol=SAME_CURVE_NORM_REL)
