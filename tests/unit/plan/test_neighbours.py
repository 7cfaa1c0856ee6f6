"""Sums of gradients in codes by node: where a search proposes them, what they send between nodes, what they save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_cases import request_of

from weft.core.plan import Plan
from weft.core.precision import resolve
from weft.plan.estimate import Estimate, estimate
from weft.plan.request import Request
from weft.plan.space import Freedom, enumerate_plans


def asked(devices: str, reduce: str = "int8") -> Request:
    request = request_of(devices=devices, global_batch=64, sequence_length=4096)
    return replace(request, precision=resolve("bf16", {"reduce": reduce}))


def estimated(mesh: dict[str, int], near: int, **data_parallel: Any) -> Estimate:
    tables = {
        "mesh": mesh,
        "precision": {"preset": "bf16", "reduce": "int8"},
        "data_parallel": {**data_parallel, "reduce_neighbours": near},
    }
    return estimate(asked("8x8xH100-80GB"), Plan.from_tables(tables))


def test_a_search_sums_by_node_where_codes_leave_it() -> None:
    columns = enumerate_plans(asked("2x8xH100-80GB"), Freedom())
    near, ranks = columns.reduce_neighbours, columns.reducing
    alone = (columns.tp == 1) & (columns.pp == 1) & (columns.ep == 1)
    assert set(near[alone & (ranks == 16)]) == {8}, "the ranks of a node"
    assert set(near[(columns.tp == 2) & (columns.ep == 1) & (ranks == 8)]) == {4}, "of one place in each tensor group"
    assert not np.any(near[alone & (ranks <= 8)]), "HSDP reduces inside a node already"
    assert not np.any(near[columns.ep > 1])
    for request, freedom in (
        (asked("8xH100-80GB"), Freedom()),
        (asked("2x8xH100-80GB", "float32"), Freedom()),
        (asked("2x8xH100-80GB"), Freedom(fixed={"data_parallel.reduce_neighbours": 0})),
    ):
        assert not np.any(enumerate_plans(request, freedom).reduce_neighbours)


@pytest.mark.parametrize(("mesh", "zero", "halves"), [({"dp_shard": 64}, 2, 1), ({"dp_replicate": 64}, 0, 2)])
def test_a_node_sends_as_many_times_less_as_it_has_ranks(mesh: dict[str, int], zero: int, halves: int) -> None:
    flat, by_node = (estimated(mesh, near, zero=zero) for near in (0, 8))
    sent = [row for row in flat.traffic if row["collective"] == "all_to_all"]
    between = [row for row in by_node.traffic if row["axis"] == "dp_between"]
    inside = [row for row in by_node.traffic if row["axis"] == "dp_inside"]
    assert len(between) == len(inside) == halves
    leaving = sent[0]["bytes"] * 56 / 63  # to ranks of other nodes
    assert leaving / between[0]["bytes"] == pytest.approx(8.0, rel=1e-6)
    assert {row["link"] for row in between}.isdisjoint({row["link"] for row in inside})
    assert by_node.step_s < flat.step_s
