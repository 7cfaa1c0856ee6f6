"""Tensor parallelism on a real GPU: ranks of one machine share the device, and Gloo carries its tensors. Run by hand.

NCCL refuses two ranks on one GPU; Gloo copies through the host, so numbers are those of real ranks, times are not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import BF16_SAME_LOSS_ABS, GPU_FP32_LOSS_ABS

pytestmark = pytest.mark.gpu

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False, "loss_parallel": False}},
    "stream and loss": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True, "loss_parallel": True}},
    "tp x ZeRO-3": {"mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
    "2d": {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
}


def curve(rank: int, world: int, family: str, plan: dict[str, Any]) -> list[float]:
    torch.cuda.set_device(0)
    engine = build_engine(family, plan, device=torch.device("cuda", 0))
    return [loss for loss, _ in train_steps(engine, 6)]


def ranks_of(plan: dict[str, Any]) -> int:
    mesh = plan.get("mesh", {})
    return int(mesh.get("tp", 1)) * int(mesh.get("dp_shard", 1))


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_ranks_that_share_a_gpu_have_its_curve(family: str, layout: str) -> None:
    plan = LAYOUTS[layout]
    if layout == "2d" and family == "mixtral":
        pytest.skip("grids refuse experts, by name")
    (single,) = run_ranks(curve, 1, family, {}, timeout_s=120)
    for found in run_ranks(curve, ranks_of(plan), family, plan, timeout_s=240):
        assert max(abs(a - b) for a, b in zip(single, found, strict=True)) <= GPU_FP32_LOSS_ABS


def test_bf16_is_near_the_same_precision_on_one_rank() -> None:
    precision = {"precision": {"preset": "bf16"}}
    (single,) = run_ranks(curve, 1, "llama", precision, timeout_s=120)
    for layout in ("plain", "stream and loss"):
        for found in run_ranks(curve, 2, "llama", {**LAYOUTS[layout], **precision}, timeout_s=240):
            assert max(abs(a - b) for a, b in zip(single, found, strict=True)) <= 4 * BF16_SAME_LOSS_ABS
