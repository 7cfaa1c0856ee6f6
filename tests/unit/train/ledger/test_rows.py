"""Rows of the ledger: what is not known stays None, errors need both sides, the dry run joins afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from weft.core.terms import TimeTerm
from weft.train.ledger.bounds import MEMORY_FLOOR_BYTES, memory_warnings, traffic_warnings
from weft.train.ledger.measuring import Measured
from weft.train.ledger.rows import row, time_rows, total_row, traffic_rows, with_dry_run

GATHER = {"axis": "dp_shard", "collective": "all_gather", "phase": "forward", "bytes": 4096, "count": 3}
NOTHING = {"axis": "dp_shard", "collective": "all_gather", "phase": "backward", "bytes": 0, "count": 3}
LEDGER: dict[str, Any] = {
    "memory": {
        "terms": {"weights": row(predicted=100, measured=110), "framework": row(predicted=7)},
        "total": row(predicted=100, measured=110),
        "peak_at": {"measured": None},
    },
    "traffic": [{**GATHER, **row(predicted=4096, measured=4096)}],
    "time": {"terms": {}},
}
DRY: dict[str, Any] = {
    "rank": 0,
    "memory": {"peak_bytes": 120, "terms": {"weights": 100, "buffers": 20}, "peak_at": {"phase": "backward"}},
    "traffic": [GATHER, {**GATHER, "collective": "all_reduce"}],
    "flops": 5,
    "elapsed_s": 1.0,
    "notes": [],
}


def measured(traffic: list[dict[str, Any]]) -> Measured:
    return Measured(peak=None, traffic=traffic, collective_s={}, flops=0, allocated_bytes=0, before_bytes=0)


def test_an_error_needs_both_sides() -> None:
    assert row(predicted=100, measured=110)["error"] == pytest.approx(0.1)
    assert row(predicted=None, measured=110)["error"] is None
    assert row(predicted=100)["error"] is None
    assert row(predicted=0, measured=110)["error"] is None
    assert row(dry_run=100, measured=90)["dry_run_error"] == pytest.approx(-0.1)


def test_the_framework_is_outside_the_total() -> None:
    assert total_row(LEDGER["memory"]["terms"]) == row(predicted=100, measured=110)


def test_a_group_of_one_rank_sends_nothing_and_has_no_row() -> None:
    [found] = traffic_rows(None, measured([GATHER, NOTHING]))
    assert (found["measured"], found["predicted"], found["count"], found["phase"]) == (4096, None, 3, "forward")


def test_unmeasured_times_have_no_prediction_without_a_planner() -> None:
    assert time_rows(None, {TimeTerm.DATA: 0.5}) == {"data": row(measured=0.5)}


def test_the_dry_run_joins_its_column() -> None:
    before = copy.deepcopy(LEDGER)
    found = with_dry_run(LEDGER, DRY)
    assert before == LEDGER
    terms = found["memory"]["terms"]
    assert list(terms) == ["weights", "buffers", "framework"]
    assert terms["weights"] == row(predicted=100, dry_run=100, measured=110)
    assert terms["buffers"]["dry_run"] == 20
    assert terms["framework"]["dry_run"] is None
    assert found["memory"]["total"]["dry_run"] == 120
    assert found["memory"]["peak_at"]["dry_run"] == {"phase": "backward"}
    gather, reduce = found["traffic"]
    assert (gather["dry_run"], gather["dry_run_error"]) == (4096, 0.0)
    assert (reduce["collective"], reduce["dry_run"], reduce["measured"]) == ("all_reduce", 4096, None)


def test_memory_is_off_only_beyond_both_bounds() -> None:
    far = 100 * MEMORY_FLOOR_BYTES
    small = row(predicted=1024, measured=4096)
    within = row(predicted=far, measured=1.09 * far)
    beyond = row(predicted=far, measured=1.11 * far)
    unknown = row(predicted=far)
    [warning] = memory_warnings({"a": small, "b": within, "activations": beyond, "c": unknown})
    assert warning == "memory term activations: predicted 6.2 GiB, measured 6.9 GiB (+11.0%)"


def test_traffic_is_off_by_a_byte() -> None:
    same, other = (
        {**GATHER, **row(predicted=4096, measured=size)} for size in (4096, 4097)
    )  # fmt: skip
    assert traffic_warnings([same]) == []
    [warning] = traffic_warnings([other])
    assert warning.startswith("traffic on dp_shard, all_gather in the forward: predicted 4.0 KiB")
