"""A float32 residual stream is verified against one process, whose stream is wide by hooks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from verify_ranks import small_run, verdicts_in_rank

WIDE = {"preset": "bf16", "residual": "float32"}
PLANS: list[dict[str, Any]] = [
    {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}},
]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
def test_a_wide_stream_is_verified(model: str, corpus: Path, tmp_path: Path) -> None:
    plans = [{**plan, "precision": WIDE} for plan in (PLANS if model == "llama" else PLANS[:2])]
    run = small_run(str(corpus), model=model)
    for verdict in run_ranks(verdicts_in_rank, 2, run, plans, str(tmp_path), timeout_s=600)[0]:
        wrong = [f"{check['name']}: {check['detail']}" for check in verdict["checks"] if not check["ok"]]
        assert not wrong
