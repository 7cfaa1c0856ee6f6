"""Choices that a plan leaves open, by the kind of device."""

from __future__ import annotations

import pytest

from weft.core.open_choices import update_place, with_update_place
from weft.core.plan import Plan


@pytest.mark.parametrize(
    ("update", "device_type", "expected"),
    [("auto", "cuda", "device"), ("auto", "cpu", "host"), ("host", "cuda", "host"), ("device", "cpu", "device")],
)
def test_states_are_updated_where_the_plan_says_or_where_it_is_faster(
    update: str, device_type: str, expected: str
) -> None:
    plan = Plan.from_tables({"offload": {"optimizer": "cpu", "update": update}})
    assert update_place(plan, device_type=device_type) == expected
    assert with_update_place(plan, device_type=device_type).offload.update == expected


def test_without_offload_there_is_no_place() -> None:
    assert update_place(Plan(), device_type="cuda") is None
    assert with_update_place(Plan(), device_type="cuda") == Plan()
