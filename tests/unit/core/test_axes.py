"""Registered axes: a key of [mesh] and a factor of the ranks; too late or twice is an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.core import axes
from weft.core.plan import Plan

REGISTERS = """
from weft.core import axes
axes.register("toy")
from weft.core.plan import Plan
plan = Plan.from_tables({"mesh": {"toy": 3, "tp": 2}})
assert plan.num_ranks == 6, plan.num_ranks
assert list(plan.mesh.sizes()) == ["pp", "toy", "dp_replicate", "dp_shard", "cp", "tp"]
assert Plan.from_tables(plan.model_dump(mode="json", exclude_none=True)) == plan
assert Plan().mesh.sizes()["toy"] == 1
for wrong in ("tp", "ep", "toy", "not a name"):
    try:
        axes.register(wrong)
    except (ValueError, RuntimeError):
        continue
    raise SystemExit(f"{wrong} was registered")
"""


def test_a_registered_axis_is_a_key_of_the_mesh() -> None:
    done = subprocess.run([sys.executable, "-c", REGISTERS], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plans_that_exist_have_no_further_axes() -> None:
    with pytest.raises(RuntimeError, match="'late' is registered too late"):
        axes.register("late")
    assert "late" not in Plan().mesh.sizes()
