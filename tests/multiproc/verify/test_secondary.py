"""A secondary shard is verified like any layout, and a part of another neighbour is caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from mutation_groups import Bug, Group, require_caught
from verify_ranks import small_run, verdicts_in_rank

from weft.engine.dp.secondary import SecondaryAllGather

SECONDARY: dict[str, Any] = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3, "secondary_shard": 2}}
PLANS: list[dict[str, Any]] = [
    {**SECONDARY, "pipeline": {"microbatches": 2}},
    {**SECONDARY, "precision": {"preset": "bf16", "gather": "int8", "reduce": "int8"}},
]


@pytest.mark.slow
def test_a_secondary_shard_is_verified(corpus: Path, tmp_path: Path) -> None:
    for verdict in run_ranks(verdicts_in_rank, 4, small_run(str(corpus)), PLANS, str(tmp_path), timeout_s=900)[0]:
        assert [f"{one['name']}: {one['detail']}" for one in verdict["checks"] if not one["ok"]] == []


@contextmanager
def all_gathers_over_all_shards() -> Iterator[None]:
    """The secondary shard is never used: the same bits, twice the bytes."""
    gather = SecondaryAllGather.__call__

    def forgetful(self: SecondaryAllGather, *args: Any, **kwargs: Any) -> None:
        self.kept = None
        gather(self, *args, **kwargs)

    SecondaryAllGather.__call__ = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        SecondaryAllGather.__call__ = gather  # type: ignore[method-assign]


@pytest.mark.slow
def test_gathers_in_the_wrong_group_are_caught(corpus: Path, tmp_path: Path) -> None:
    bugs = (Bug(mutate=all_gathers_over_all_shards, check="prediction"),)
    group = Group(plan=PLANS[0], bugs=bugs, num_ranks=4)
    require_caught(group, corpus, tmp_path)
