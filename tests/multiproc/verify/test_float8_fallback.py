"""Plans whose layers fall back from float8, against a reference that decides by its own arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from verify_ranks import small_run, verdicts_in_rank

LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
}


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_fall_back_where_those_of_the_reference_do(layout: str, corpus: Path, tmp_path: Path) -> None:
    # the gradients of some layers, in steps of 5 bits, err more than the operands of others
    float8 = {"linears": "all", "measure_every": 1, "fallback_error": 0.05}
    plan = {"precision": {"preset": "bf16"}, "float8": float8, **LAYOUTS[layout]}
    run = small_run(str(corpus), model="llama-wide")
    verdict = run_ranks(verdicts_in_rank, 2, run, [plan], str(tmp_path), timeout_s=500)[0][0]
    assert verdict["ok"], [check for check in verdict["checks"] if not check["ok"]]
