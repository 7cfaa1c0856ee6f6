"""Experts over ranks on a real GPU: the kernels that move rows, and compiled experts. Run by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import BF16_SAME_LOSS_ABS, GPU_FP32_LOSS_ABS

from weft.engine.ep.rows import sorted_order, sum_rows, take_rows
from weft.engine.ep.wire import packed, unpacked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [7, 64, 2048, 5000])
@pytest.mark.parametrize("has_weights", [False, True])
def test_rows_move_as_on_a_cpu(width: int, has_weights: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-3, 9, (300, 6), generator=generator)
    hidden, pull = (torch.randn(300, width, generator=generator) for _ in range(2))
    weights = torch.rand(300, 6, generator=generator) if has_weights else None
    found, wanted = (outcome(torch.device(kind), keys, hidden, weights, pull) for kind in ("cuda", "cpu"))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-5, atol=2e-5)
    again = outcome(torch.device("cuda"), keys, hidden, weights, pull)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "the bits differ between runs"


def outcome(device: torch.device, keys: Any, hidden: Any, weights: Any, pull: Any) -> list[torch.Tensor]:
    order = sorted_order(keys.to(device), int((keys >= 0).sum()))
    inputs = [value.to(device).detach().clone().requires_grad_() for value in (hidden, weights) if value is not None]
    out = sum_rows(torch.tanh(take_rows(inputs[0], order)), order, *inputs[1:])
    (out * pull.to(device)).sum().backward()
    return [out.detach(), *(value.grad for value in inputs)]  # type: ignore[list-item]


@pytest.mark.parametrize("width", [7, 128, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_float8_have_the_bits_of_a_cpu(width: int, dtype: torch.dtype) -> None:
    powers = torch.randint(-120, 100, (300, 1), generator=torch.Generator().manual_seed(1))
    rows = (torch.randn(300, width, generator=torch.Generator().manual_seed(0)) * 2.0**powers).to(dtype)
    rows[5, -1], rows[6, 0], rows[7] = float("inf"), float("nan"), 0.0
    words = packed(rows, "float8")
    on_gpu = packed(rows.cuda(), "float8")
    assert torch.equal(on_gpu.cpu()[8:], words[8:])
    found, wanted = (unpacked(sent, "float8", width, dtype).cpu() for sent in (on_gpu, words))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert packed(rows[:0].cuda(), "float8").shape == (0, words.shape[1])


LAYOUTS: dict[str, dict[str, Any]] = {
    "pairs": {"expert_parallel": {"dispatcher": "pairs"}},
    "tokens": {"expert_parallel": {"dispatcher": "tokens"}},
    "gather": {"expert_parallel": {"dispatcher": "gather"}},
    "compiled": {"expert_parallel": {"dispatcher": "tokens"}, "compile": {"enabled": True}},
}


def curve(rank: int, world: int, plan: dict[str, Any]) -> list[float]:
    torch.cuda.set_device(0)
    engine = build_engine("mixtral", plan, device=torch.device("cuda", 0))
    return [loss for loss, _ in train_steps(engine, 6)]


@pytest.mark.parametrize("preset", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_ranks_that_share_a_gpu_have_its_curve(layout: str, preset: str) -> None:
    precision = {"precision": {"preset": preset}}
    (alone,) = run_ranks(curve, 1, precision, timeout_s=180.0)
    allowed = GPU_FP32_LOSS_ABS if preset == "fp32" else 4 * BF16_SAME_LOSS_ABS
    for found in run_ranks(
        curve, 2, {**LAYOUTS[layout], **precision, "mesh": {"dp_shard": 2, "ep": 2}}, timeout_s=240.0
    ):
        assert found == pytest.approx(alone, abs=allowed)
