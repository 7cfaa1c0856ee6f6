"""How a global batch is cut: evenly, or refused with numbers that would do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.batching import require_divisible
from weft.core.errors import BatchError
from weft.core.plan import Plan


def plan(replicas: int, microbatches: int) -> Plan:
    return Plan.from_tables({"mesh": {"dp_replicate": replicas}, "pipeline": {"microbatches": microbatches}})


@given(rows=st.integers(1, 8), replicas=st.integers(1, 8), microbatches=st.integers(1, 8))
def test_even_cuts_pass(rows: int, replicas: int, microbatches: int) -> None:
    require_divisible(rows * replicas * microbatches, plan(replicas, microbatches))


@pytest.mark.parametrize(("global_batch", "hint"), [(10, "8 or 16"), (3, "to 8,")])
def test_uneven_ones_name_the_neighbours(global_batch: int, hint: str) -> None:
    with pytest.raises(BatchError, match=f"global batch of {global_batch}") as caught:
        require_divisible(global_batch, plan(2, 4))
    assert hint in caught.value.hint
