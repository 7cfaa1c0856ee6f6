"""Adapters on a GPU have the losses of a CPU in float32."""

from __future__ import annotations

import pytest
import torch
from adapters import build_adapted
from gpu_engines import losses, worst
from tolerances import GPU_FP32_LOSS_ABS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("zero", [0, 3])
def test_a_gpu_has_the_losses_of_a_cpu(zero: int) -> None:
    plan = {"data_parallel": {"zero": zero}}
    with build_adapted("llama", plan) as engine:
        expected = losses(engine)
    with build_adapted("llama", plan, device=torch.device("cuda", 0)) as engine:
        assert worst(expected, losses(engine)) <= GPU_FP32_LOSS_ABS
