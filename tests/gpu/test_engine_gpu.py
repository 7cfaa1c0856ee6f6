"""The engine on a real GPU: precisions, strategies of one rank, checkpoints, the legacy DataParallel. Run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_engines import CUDA, engine_on, losses, worst
from tolerances import BF16_LOSS_ABS, BF16_SAME_LOSS_ABS, GPU_FP32_LOSS_ABS

from weft.engine.dp.threads import DataParallelSlownessWarning

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "mixtral"])
def test_fp32_on_the_gpu_is_the_cpu_s_curve(family: str) -> None:
    expected = losses(engine_on(torch.device("cpu"), family, {}))
    for zero in (0, 1, 2, 3):
        plan = {"data_parallel": {"zero": zero}, "pipeline": {"microbatches": 4}}
        assert worst(expected, losses(engine_on(CUDA, family, plan))) <= GPU_FP32_LOSS_ABS


@pytest.mark.parametrize("preset", ["bf16", "fp16"])
def test_low_precision_is_near_fp32_and_the_same_under_every_stage(preset: str) -> None:
    expected = losses(engine_on(CUDA, "llama", {}))
    single = losses(engine_on(CUDA, "llama", {"precision": {"preset": preset}}))
    assert worst(expected, single) <= BF16_LOSS_ABS
    for zero in (1, 3):
        engine = engine_on(CUDA, "llama", {"precision": {"preset": preset}, "data_parallel": {"zero": zero}})
        assert worst(single, losses(engine)) <= BF16_SAME_LOSS_ABS
        assert all(record.ok for record in engine.dtypes()), engine.dtypes()


def test_dropout_does_not_depend_on_the_cut() -> None:
    whole = losses(engine_on(CUDA, "gpt2", {}))
    cut = losses(engine_on(CUDA, "gpt2", {"pipeline": {"microbatches": 4}}))
    assert worst(whole, cut) <= GPU_FP32_LOSS_ABS


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of the compiler's own imports
def test_adamw8bit_compiles_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    engine = engine_on(CUDA, "llama", {"data_parallel": {"zero": 3}}, kind="adamw8bit")
    losses(engine, 4)
    engine.save(tmp_path)
    going_on = losses(engine, 2)
    other = engine_on(CUDA, "llama", {}, kind="adamw8bit")
    assert other.load(tmp_path) == 4
    assert worst(going_on, losses(other, 2)) <= GPU_FP32_LOSS_ABS


def test_dataparallel_warns_and_trains() -> None:
    expected = losses(engine_on(CUDA, "llama", {}), 3)
    with pytest.warns(DataParallelSlownessWarning, match="DDP"):
        engine = engine_on(CUDA, "llama", {"data_parallel": {"strategy": "dataparallel"}})
    assert worst(expected, losses(engine, 3)) <= GPU_FP32_LOSS_ABS


def test_the_command_trains_in_bf16_by_default_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "weft", "train"]
    first = [*command, "--out", str(out), "--set", "train.steps=30", "--json"]
    result = subprocess.run(first, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    ledger = json.loads(result.stdout)
    assert ledger["run"]["device"] == "cuda"
    assert "bf16" in (out / "plan.toml").read_text()
    assert ledger["run"]["final_loss"] < ledger["run"]["first_loss"]
    more = subprocess.run(
        [*command, "--resume", str(out), "--set", "train.steps=35"], capture_output=True, text=True, check=False
    )
    assert more.returncode == 0, more.stderr
    assert "resuming from step 30" in more.stderr
