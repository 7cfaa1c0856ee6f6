"""Actions print as torch's pipeline runtime reads them, and parse back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import BadValueError
from weft.schedule import Action, Kind

ACTIONS = st.builds(Action, st.sampled_from(Kind), st.integers(0, 999), st.integers(0, 99999))


def test_the_printed_form_is_stage_kind_microbatch() -> None:
    assert str(Action(Kind.F, 0, 3)) == "0F3"
    assert str(Action(Kind.I, 2, 1)) == "2I1"


@given(ACTIONS)
def test_the_printed_form_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3x", "-1F3", "0f3"])
def test_what_is_no_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadValueError, match="not a pipeline action") as caught:
        Action.parse(text)
    assert "2I1" in caught.value.hint
