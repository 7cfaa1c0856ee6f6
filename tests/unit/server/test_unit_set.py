"""Numbers are applied once, in whatever order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.server.units import UnitSet


@given(st.lists(st.integers(0, 30)))
def test_it_is_a_set_with_a_watermark(numbers: list[int]) -> None:
    applied = UnitSet()
    for number in numbers:
        applied.add(number) if number not in applied else None
    expected = set(numbers)
    assert [number in applied for number in range(32)] == [number in expected for number in range(32)]
    assert len(applied) == len(expected)
    assert applied.watermark == next(number for number in range(32) if number not in expected)
    assert all(number in UnitSet(**applied.as_dict()) for number in expected)
