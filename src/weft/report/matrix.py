"""The page of `weft verify --all`: plans down, checks across, all details below. Its input is the verb's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.report.markup import Markup, chip, fold, grid, join, text
from weft.report.page import Page, PageSection, write_page


def write_matrix(answer: Mapping[str, Any], path: Path) -> Path:
    """Write `answer` as a page at `path`."""
    return write_page(_page(answer), path, hint="choose another --matrix")


def _page(answer: Mapping[str, Any]) -> Page:
    verdicts: Sequence[Mapping[str, Any]] = answer["verdicts"]
    passed = sum(bool(verdict["ok"]) for verdict in verdicts)
    details = [fold(text(verdict["plan"]), _checks(verdict), is_open=not verdict["ok"]) for verdict in verdicts]
    return Page(
        title="verify",
        heading="weft verify",
        status="pass" if answer["ok"] else "FAIL",
        verdict=f"{answer['run']}: {passed} of {len(verdicts)} plans pass",
        sections=[
            PageSection(key="matrix", title="Plans and checks", content=_table(verdicts)),
            PageSection(key="details", title="Details", content=join(details)),
        ],
        has_charts=False,
    )


def _table(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(check["name"] for verdict in verdicts for check in verdict["checks"]))
    rows = []
    for verdict in verdicts:
        by_name = {check["name"]: check for check in verdict["checks"]}
        cells = [_mark(ok=by_name[name]["ok"]) if name in by_name else text("–") for name in names]
        rows.append([text(verdict["plan"]), _mark(ok=verdict["ok"]), *cells])
    return grid(rows, columns=["plan", "verdict", *names], caption="Every plan against the one-process reference")


def _checks(verdict: Mapping[str, Any]) -> Markup:
    rows = [[text(check["name"]), _mark(ok=check["ok"]), text(check["detail"])] for check in verdict["checks"]]
    return grid(rows, columns=["check", "answer", "detail"], caption=f"{verdict['elapsed_s']:.1f} s")


def _mark(*, ok: bool) -> Markup:
    return chip("pass", kind="good") if ok else chip("FAIL", kind="bad")
