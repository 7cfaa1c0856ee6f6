"""Adapters over a base in codes: `weft verify` holds them against one process, in 16 bits too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from verify_ranks import small_run, verdicts_in_rank

BF16 = {"precision": {"preset": "bf16"}}
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "nf4": (1, BF16),
    "int8": (2, {**BF16, "mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}),
}


@pytest.mark.extended
@pytest.mark.parametrize("base", PLANS)
def test_an_adapter_over_codes_is_verified(base: str, corpus: Path, tmp_path: Path) -> None:
    ranks, plan = PLANS[base]
    run = {**small_run(str(corpus), model="llama-wide"), "adapter": {"kind": "lora", "rank": 4, "base": base}}
    (verdict,) = run_ranks(verdicts_in_rank, ranks, run, [plan], str(tmp_path), timeout_s=600)[0]
    assert [f"{one['name']}: {one['detail']}" for one in verdict["checks"] if not one["ok"]] == []
