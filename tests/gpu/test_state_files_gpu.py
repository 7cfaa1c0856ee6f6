"""States in files on a real GPU: bits against states on the device, restarts, checkpoints. The folder must be on a disk
that takes direct transfers (`--basetemp`)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engines import CUDA
from offloaded import digests, trained
from state_files import close_files, file_engine, trained_in_files
from tiny import train_steps
from torch.nn.attention import SDPBackend

from weft.core.state_folder import ANY_STEP
from weft.engine.kernels.attention import prefer_kernels

pytestmark = pytest.mark.gpu

BF16: dict[str, Any] = {"precision": {"preset": "bf16"}, "kernels": {"attention": "torch"}}


@pytest.fixture(autouse=True)
def _repeatable_kernels() -> Iterator[None]:
    """Fused attention sums in the order in which its blocks finish: two right runs would differ."""
    with prefer_kernels(SDPBackend.MATH):
        yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("durable", ["checkpoint", "step"])
@pytest.mark.parametrize(
    "plan",
    [{**BF16, "pipeline": {"microbatches": 4}}, {**BF16, "data_parallel": {"zero": 3}}, {"kernels": BF16["kernels"]}],
)
def test_the_device_update_has_the_bits_of_the_run_without_offload(
    plan: dict[str, Any], durable: str, tmp_path: Path
) -> None:
    expected = trained("llama", plan, "", device=CUDA, steps=6)
    found = trained_in_files("llama", plan, tmp_path, "device", device=CUDA, steps=6, durable=durable)
    assert found == expected


@pytest.mark.parametrize("plan", [BF16, {"kernels": BF16["kernels"]}])
def test_the_host_update_has_the_bits_of_states_in_host_memory(plan: dict[str, Any], tmp_path: Path) -> None:
    expected = trained("llama", plan, "host", device=CUDA, steps=6)
    assert trained_in_files("llama", plan, tmp_path, "host", device=CUDA, steps=6, durable="step") == expected


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_restart_and_a_checkpoint_continue_the_run(update: str, tmp_path: Path) -> None:
    states = tmp_path / "states"
    engine = file_engine("llama", BF16, states, update, device=CUDA, durable="step")
    train_steps(engine, 3)
    engine.save(tmp_path)
    close_files(engine)
    again = file_engine("llama", BF16, states, update, device=CUDA, durable="step", resume=ANY_STEP, seed=3)
    loaded = file_engine("llama", BF16, tmp_path / "others", update, device=CUDA, seed=4)
    assert (again.steps_done, loaded.load(tmp_path)) == (3, 3)
    assert digests(again) == digests(loaded)
    assert train_steps(again, 2, first=3) == train_steps(loaded, 2, first=3)
    assert digests(again) == digests(loaded)
    for one in (again, loaded):
        close_files(one)
