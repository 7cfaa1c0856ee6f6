"""Memory on a real GPU: the dry run against the allocator, the meter against both, recompute, and running out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import FAMILIES, global_batch

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining, dry_run
from weft.engine.engine import Engine
from weft.engine.kernels.compiled import failures
from weft.engine.measure.meter import StepMeter
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe

pytestmark = pytest.mark.gpu

MODEL: dict[str, Any] = {
    "type": "llama",
    "config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
}  # fmt: skip
RUN = RunSpec.from_tables({"model": MODEL, "data": {"sequence_length": 2048}, "train": {"global_batch": 4}})
BF16 = {"precision": {"preset": "bf16"}}


def of_vocabulary(vocab_size: int) -> RunSpec:
    config = {**MODEL["config"], "vocab_size": vocab_size}
    return RUN.model_copy(update={"model": RUN.model.model_copy(update={"config": config})})


def measured(plan: Plan, run: RunSpec = RUN) -> tuple[int, StepMeter]:
    """The allocator's peak of a step, and what the meter says of the next ones."""
    stage = FakeTraining(run, plan, device=torch.device("cuda", 0))
    stage.build()
    for _ in range(2):
        stage.step()
    assert failures(stage.engine.model) == []
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    stage.step()
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    meter = StepMeter(stage.engine)
    for _ in range(3):
        with meter.measuring():
            meter.next_step()
            stage.step()
    return peak_bytes, meter


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_dry_run_is_the_allocators_peak(zero: int, policy: str) -> None:
    plan = Plan.from_tables({"data_parallel": {"zero": zero}, "activations": {"policy": policy}, **BF16})
    predicted = dry_run(RUN, plan)
    real, meter = measured(plan)
    assert predicted.peak_bytes == pytest.approx(real, rel=0.005)
    assert meter.is_complete
    assert meter.peak.as_dict()["peak_at"] == predicted.peak.as_dict()["peak_at"]
    assert meter.peak.peak_bytes == pytest.approx(predicted.peak_bytes, abs=2**28)  # workspaces hide from the meter


# torch's own tracing asks non-leaf tensors for gradients, and hides that warning only where warnings are no errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("vocab_size", [1024, 32000])  # most is needed by a block's backward, or by the loss
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_dry_run_of_compiled_blocks_is_the_allocators_peak(policy: str, vocab_size: int) -> None:
    tables = {"compile": {"enabled": True}, "kernels": {"loss": "fused"}, "activations": {"policy": policy}, **BF16}
    run = of_vocabulary(vocab_size)
    plan = Plan.from_tables({"data_parallel": {"zero": 2}, **tables})
    predicted = dry_run(run, plan)
    assert measured(plan, run)[0] == pytest.approx(predicted.peak_bytes, rel=0.01)
    assert predicted.notes == ()


def test_recompute_gives_the_same_losses() -> None:
    config = build_config(FAMILIES["llama"], vocab_size=257)
    curves = {}
    for policy in ("none", "selective", "full"):
        skeleton = build_skeleton(config)
        engine = Engine(
            build_skeleton(config),
            Plan.from_tables({"data_parallel": {"zero": 3}, "activations": {"policy": policy}, **BF16}),
            weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=torch.device("cpu")),
            device=torch.device("cuda", 0),
        )
        curves[policy] = [engine.step(global_batch(step)).loss for step in range(5)]
        if dist.is_initialized():
            dist.destroy_process_group()
    assert curves["selective"] == curves["full"] == curves["none"]


def test_running_out_is_one_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        RunSpec.from_tables(
            {
                "model": MODEL,
                "data": {"sequence_length": 2048},
                "train": {"global_batch": 1024, "steps": 2},
                "ledger": {"dry_run": False},
            }
        ).to_toml()
    )
    command = [sys.executable, "-m", "weft", "train", str(run), "--out", str(tmp_path / "out"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 3, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    said = json.loads(ended.stdout)
    assert said["code"] == "W703"
    assert said["message"].startswith("out of memory in step 1, ")
    assert "were requested; the device has" in said["message"]
    assert "GiB" in said["hint"]  # of a change that would fit
