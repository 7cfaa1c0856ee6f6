"""Which cases of a test run by default. The others are marked slow: they run with `-m slow`, for the whole picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(chosen: Iterable[Any], cases: Iterable[Any], *, extended: Iterable[Any] = ()) -> list[Any]:
    """`cases` for parametrize (tuples are several arguments): chosen ones run always, `extended` ones in CI, others are
    slow."""
    chosen, cases, extended = list(chosen), list(cases), list(extended)
    missing = [case for case in (*chosen, *extended) if case not in cases]
    if missing:
        raise ValueError(f"not among the cases: {missing}")

    def marks(case: Any) -> Any:
        if case in chosen:
            return ()
        return pytest.mark.extended if case in extended else pytest.mark.slow

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
