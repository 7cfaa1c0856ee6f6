"""Which cases of a test run by default. The others are marked slow: they run with `-m slow`, for the whole picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(chosen: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` for parametrize (tuples are several arguments), all but the chosen ones slow."""
    chosen, cases = list(chosen), list(cases)
    missing = [case for case in chosen if case not in cases]
    if missing:
        raise ValueError(f"not among the cases: {missing}")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]
