"""How a global batch is cut: evenly, or refused with numbers that would do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.batching import require_divisible
from weft.core.errors import BatchError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec


def run(global_batch: int, sequence_length: int = 64) -> RunSpec:
    return RunSpec.from_tables(
        {
            "data": {"sequence_length": sequence_length},
            "train": {"global_batch": global_batch},
            "model": {"type": "llama"},
        }
    )


def plan(replicas: int, microbatches: int) -> Plan:
    return Plan.from_tables({"mesh": {"dp_replicate": replicas}, "pipeline": {"microbatches": microbatches}})


@given(rows=st.integers(1, 8), replicas=st.integers(1, 8), microbatches=st.integers(1, 8))
def test_even_cuts_pass(rows: int, replicas: int, microbatches: int) -> None:
    require_divisible(run(rows * replicas * microbatches), plan(replicas, microbatches))


@pytest.mark.parametrize(("global_batch", "hint"), [(10, "8 or 16"), (3, "to 8,")])
def test_uneven_ones_name_the_neighbours(global_batch: int, hint: str) -> None:
    with pytest.raises(BatchError, match=f"global batch of {global_batch}") as caught:
        require_divisible(run(global_batch), plan(2, 4))
    assert hint in caught.value.hint


@pytest.mark.parametrize(("mode", "tp", "rows"), [("2d", 4, 2), ("2.5d", 8, 4), ("3d", 8, 4)])
def test_a_grid_deals_out_rows_too(mode: str, tp: int, rows: int) -> None:
    tables: dict[str, Any] = {"mesh": {"tp": tp}, "tensor_parallel": {"mode": mode}}
    require_divisible(run(rows), Plan.from_tables(tables))
    with pytest.raises(BatchError, match=f"{rows} rows of the {mode} grid"):
        require_divisible(run(rows // 2), Plan.from_tables(tables))


def test_a_sequence_that_ranks_cannot_share_is_refused_where_they_would_share_it() -> None:
    with pytest.raises(BatchError, match="a sequence of 30") as caught:
        require_divisible(run(1, 30), Plan.from_tables({"mesh": {"tp": 4}}))
    assert "28 or 32" in caught.value.hint
    require_divisible(
        run(1, 30), Plan.from_tables({"mesh": {"tp": 4}, "tensor_parallel": {"sequence_parallel": False}})
    )
