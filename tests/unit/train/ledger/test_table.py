"""Percentages where they mean something: noise has none, and neither has a guess about another machine."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from weft.core.agreement import GUESSED_TIMES, format_error, has_guessed_times, memory_row, time_row
from weft.train.ledger.table import cost_table


def row(predicted: float | None, measured: float | None) -> dict[str, Any]:
    error = measured / predicted - 1 if predicted and measured is not None else None
    return {"predicted": predicted, "dry_run": None, "measured": measured, "error": error}


def ledger(device: str, *, calibrated: bool = False, predicted_s: float = 1e-4, measured_s: float = 0.015) -> Any:
    return {
        "memory": {"terms": {"weights": row(2**24, 2**24), "gradients": row(2**10, 2**17)}, "total": row(2**28, 2**28)},
        "traffic": [],
        "time": {"terms": {"forward_backward": row(1.0, 1.2), "optimizer": row(predicted_s, measured_s)}},
        "prediction": {"device": device, "calibrated": calibrated, "fits": True},
    }


def shown(found: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(cost_table(found))
    return out.getvalue()


def test_a_time_of_less_than_five_milliseconds_has_no_error() -> None:
    text = shown(ledger("H200"))
    assert "+20.0%" in text
    assert "14900" not in text
    assert re.search(r"optimizer +│[^│]+│ +15ms │ +│", text)


def test_times_of_a_cpu_that_nobody_measured_are_not_compared() -> None:
    guessed, known = ledger("CPU"), ledger("CPU", calibrated=True)
    assert (has_guessed_times(guessed), has_guessed_times(known), has_guessed_times({})) == (True, False, False)
    assert "+20.0%" not in shown(guessed)
    assert "1.2s" in shown(guessed)
    assert "1.0s" not in shown(guessed)
    assert "+20.0%" in shown(known)
    assert "weft.calibration.toml" in GUESSED_TIMES


def test_a_memory_term_that_is_nothing_of_the_peak_has_no_error() -> None:
    text = shown(ledger("H200"))
    assert "+0.0%" in text
    assert re.search(r"gradients +│ +1\.0 KiB │ 128\.0 KiB │ +│", text)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans())
def test_what_is_measured_is_always_shown(predicted: float, measured: float, is_guessed: bool) -> None:
    found = row(predicted, measured)
    assert time_row(found, is_guessed=is_guessed)["measured"] == measured
    assert memory_row(found, total=row(1e3, 1e3))["measured"] == measured
    assert set(time_row(found, is_guessed=is_guessed)) == set(found)


@pytest.mark.parametrize(("error", "text"), [(0.0, "+0.0%"), (-0.98, "-98.0%"), (1.0, "+100.0%"), (149.066, "150.1x")])
def test_hundreds_of_percent_are_a_multiple(error: float, text: str) -> None:
    assert format_error(error) == text
