"""On a GPU a profile has kernels, the time of the GPU by operator, and the allocator's history."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.core.loop_spec import ProfileSpec
from weft.train.step_profiler import StepProfiler

pytestmark = pytest.mark.gpu


def test_a_profile_of_a_gpu_has_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    device = torch.device("cuda")
    layer = nn.Linear(256, 256, device=device)
    profiler = StepProfiler(ProfileSpec(first_step=2, steps=2), tmp_path, rank=0, device=device)
    for step in range(1, 5):
        with profiler.step(step):
            layer(torch.ones(64, 256, device=device)).sum().backward()
    profiler.close()
    assert profiler.written == ("profile/trace-rank0.json.gz", "profile/memory-rank0.pickle")
    trace: dict[str, Any] = json.loads(gzip.decompress((tmp_path / "profile" / "trace-rank0.json.gz").read_bytes()))
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert kernels
    snapshot = pickle.loads((tmp_path / "profile" / "memory-rank0.pickle").read_bytes())
    assert any(event["action"] == "alloc" for events in snapshot["device_traces"] for event in events)
    found = json.loads((tmp_path / "profile" / "operators.json").read_text())
    assert found["device"] == "cuda"
    assert 0 < found["total_s"] < 60
