"""Rows that dispatchers send, and the choice between them."""

from __future__ import annotations

import pytest

from weft.core.experts import choose_dispatcher, rows_sent
from weft.core.open_choices import with_dispatcher
from weft.core.plan import Plan


def rows(num_experts: int, top_k: int, ep: int) -> list[float]:
    kinds = ("pairs", "tokens", "gather")
    return [round(rows_sent(kind, num_experts=num_experts, top_k=top_k, ep=ep), 2) for kind in kinds]


def test_rows_that_leave_a_rank() -> None:
    assert rows(128, 8, 8) == [7.0, 4.67, 7.0]
    assert rows(128, 8, 2) == [4.0, 1.0, 1.0]
    assert rows(8, 2, 8) == [1.75, 1.75, 7.0]
    assert rows(7, 7, 2) == [3.5, 1.0, 1.0]  # every rank holds an expert of every token


@pytest.mark.parametrize(
    ("layers", "ep", "kind"),
    [
        ([(128, 8)], 2, "gather"),
        ([(128, 8)], 4, "gather"),  # 1.11 x the rows
        ([(128, 8)], 8, "tokens"),
        ([(8, 2)], 2, "tokens"),  # 1.27 x
        ([(128, 8), (8, 2)], 2, "tokens"),
        ([(128, None)], 2, "tokens"),
    ],
)
def test_few_more_rows_are_gathered(layers: list[tuple[int, int | None]], ep: int, kind: str) -> None:
    assert choose_dispatcher(layers, ep=ep) == kind


def test_only_an_open_dispatcher_is_chosen() -> None:
    def chosen(**tables: object) -> str:
        return with_dispatcher(Plan.from_tables(tables), [(128, 8)]).expert_parallel.dispatcher

    mesh = {"dp_shard": 2, "ep": 2}
    assert chosen(mesh=mesh) == "gather"
    assert chosen(mesh=mesh, expert_parallel={"dispatcher": "pairs"}) == "pairs"
    kept = Plan.from_tables({"mesh": mesh, "expert_parallel": {"tensor": "width"}})
    assert with_dispatcher(kept, [(128, 8)]).expert_parallel.tensor == "width"
    assert chosen(mesh={"dp_shard": 2}) == "auto"
