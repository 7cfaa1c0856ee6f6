"""`data_parallel.all_reduce` verified: every algorithm passes on real ranks; a sum that loses a rank is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from gloo_ranks import run_ranks
from verify_ranks import Tables, mutated_verdicts_in_rank, small_run, verdicts_in_rank

from weft.comm.algorithms.rounds import CollectiveTask
from weft.comm.wire import Wire


def ddp(algorithm: str) -> Tables:
    table = {"all_reduce": algorithm, "bucket_bytes": 2**14}
    return {"mesh": {"dp_replicate": 4}, "data_parallel": table, "pipeline": {"microbatches": 2}}


PIPELINE = {
    "mesh": {"dp_replicate": 2, "pp": 2},
    "data_parallel": {"all_reduce": "ring"},
    "pipeline": {"schedule": "1f1b", "microbatches": 2},
}
HSDP = {
    "mesh": {"dp_replicate": 2, "dp_shard": 1, "pp": 2},
    "data_parallel": {"zero": 1, "all_reduce": "halving"},
    "pipeline": {"schedule": "1f1b", "microbatches": 2},
}


def require_ok(verdicts: list[Any], num: int) -> None:
    assert [verdict["first_wrong"] for verdict in verdicts if not verdict["ok"]] == []
    assert len(verdicts) == num
    names = {check["name"]: check["detail"] for check in verdicts[0]["checks"]}
    assert "all_reduce" in names["collectives"]  # counted, and as many as planned


def test_a_plan_with_an_algorithm_is_verified_like_every_layout(corpus: Path, tmp_path: Path) -> None:
    verdicts = run_ranks(verdicts_in_rank, 4, small_run(str(corpus)), [ddp("tree")], str(tmp_path), 2, timeout_s=240)
    require_ok(verdicts[0], 1)


@pytest.mark.slow
def test_every_algorithm_and_layout_passes(corpus: Path, tmp_path: Path) -> None:
    plans = [*map(ddp, ("ring", "star", "naive", "halving", "hierarchical")), PIPELINE, HSDP]
    verdicts = run_ranks(verdicts_in_rank, 4, small_run(str(corpus)), plans, str(tmp_path), 3, timeout_s=900)
    require_ok(verdicts[0], len(plans))


class LosesTheLastMessage:
    """One chunk of the sum is that of this rank alone."""

    def __enter__(self) -> None:
        run = Wire.run

        def damaged(wire: Wire, algorithm: Any, task: CollectiveTask, source: Any, target: Any) -> None:
            kept = target[-4:].clone()
            run(wire, algorithm, task, source, target)
            target[-4:] = kept

        self._patch = patch.object(Wire, "run", damaged)
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def damaged_verdicts(rank: int, _world: int, run: Tables, plan: Tables, scratch: str) -> dict[str, Tables]:
    return mutated_verdicts_in_rank(rank, run, plan, scratch, {"a lost message": LosesTheLastMessage}, steps=2)


@pytest.mark.extended
def test_a_sum_that_lacks_a_message_is_caught(corpus: Path, tmp_path: Path) -> None:
    found = run_ranks(
        damaged_verdicts,
        2,
        small_run(str(corpus)),
        {**ddp("ring"), "mesh": {"dp_replicate": 2}},
        str(tmp_path),
        timeout_s=300,
    )
    assert found[0][""]["ok"]
    assert not found[0]["a lost message"]["ok"]
