"""The matrix of a verification: plans down, checks across, one self-contained page without scripts.

Input is the JSON of `weft verify --all`; it judges nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft.core.errors import RunFolderError
from weft.report.markup import Markup, chip, fold, grid, join, section, tag, text
from weft.report.palette import css_variables

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_matrix(answer: Mapping[str, Any], path: Path) -> Path:
    """`answer` as a page at `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_matrix(answer), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}", hint="choose another --matrix") from None
    return path


def render_matrix(answer: Mapping[str, Any]) -> str:
    verdicts: Sequence[Mapping[str, Any]] = answer["verdicts"]
    passed = sum(bool(verdict["ok"]) for verdict in verdicts)
    style = files("weft.report").joinpath("style.css").read_text(encoding="utf-8")
    head = tag("h1", text("weft verify"), text(" "), _mark(ok=bool(answer["ok"])))
    line = tag("p", text(f"{answer['run']}: {passed} of {len(verdicts)} plans pass"))
    body = join([section(_table(verdicts), key="matrix", title="Plans and checks"), _wrong(verdicts)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>weft verify</title><style>{css_variables()}{style}</style></head>"
        f"<body><header>{head}{line}</header><main>{body}</main></body></html>\n"
    )


def _table(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    names = list(dict.fromkeys(check["name"] for verdict in verdicts for check in verdict["checks"]))
    rows = []
    for verdict in verdicts:
        by_name = {check["name"]: check for check in verdict["checks"]}
        cells = [_mark(ok=by_name[name]["ok"]) if name in by_name else text("–") for name in names]
        rows.append([text(verdict["plan"]), _mark(ok=verdict["ok"]), *cells])
    return grid(rows, columns=["plan", "verdict", *names], caption="Every plan against the one-process reference")


def _wrong(verdicts: Sequence[Mapping[str, Any]]) -> Markup:
    """What is wrong, plan by plan; and all details, folded."""
    details = [fold(text(verdict["plan"]), _checks(verdict), is_open=not verdict["ok"]) for verdict in verdicts]
    return section(*details, key="details", title="Details")


def _checks(verdict: Mapping[str, Any]) -> Markup:
    rows = [[text(check["name"]), _mark(ok=check["ok"]), text(check["detail"])] for check in verdict["checks"]]
    return grid(rows, columns=["check", "answer", "detail"], caption=f"{verdict['elapsed_s']:.1f} s")


def _mark(*, ok: bool) -> Markup:
    return chip("pass", kind="good") if ok else chip("FAIL", kind="bad")
