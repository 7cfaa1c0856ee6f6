"""The answers of the server, as values: the table of runs, curves, a run's report, the plan explorer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.core.errors import BadValueError, RunFolderError, WeftError
from weft.ui import explorer
from weft.ui.index import MetricsIndex
from weft.ui.indexer import Indexer
from weft.ui.kept_curves import KeptCurves
from weft.ui.runs import RunList
from weft.ui.thinning import Floats, thin_curve
from weft.ui.values import VALUES

AXES = {"step": "step", "tokens": "tokens", "time": "seconds"}
MAX_WIDTH, MAX_CURVES = 4_000, 400
MANY = 12  # runs: beyond, curves have fewer points, and smoothed ones are drawn without the raw ones below them
WIDTH, WIDTH_OF_MANY = 700, 300
SAMPLED_STATES = 5  # of a file that is still being read: curves of samples are made again so often
X_DIGITS, Y_DIGITS = 15, 8  # tokens are whole numbers below 2^53, values have 32 bits
MAX_PREPARED = 50  # runs; as many as the page draws at first
Query = Mapping[str, Sequence[str]]


class _Shape(NamedTuple):
    """What is asked of a curve: the value, the axis below it, pixel columns, the range of the axis."""

    field: str
    over: str
    width: int
    low: float
    high: float
    is_log: bool
    means_alone: bool

    @property
    def is_zoomed(self) -> bool:
        return math.isfinite(self.low) or math.isfinite(self.high)


class PageData:
    """One method per path of the server."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.runs, self.indexer = RunList(folder), Indexer(cache)
        self.kept = KeptCurves(self.indexer.folder)

    def prepare(self) -> None:
        """Make what the page asks for first, while the browser starts."""
        with contextlib.suppress(OSError, WeftError), self.indexer.requests():
            newest = sorted(self.table()["runs"], key=lambda run: -run["updated"])[:MAX_PREPARED]
            self.curves({"run": [run["name"] for run in newest], "smoothed": ["1"]})

    def table(self) -> dict[str, Any]:
        """Every run, with the progress of the index."""
        rows = self.runs.rows()
        for row, path in zip(rows, self.runs.paths().values(), strict=False):
            if row["size"]:
                row["fields"] = sorted(self.indexer.open(path).fields.union(row["fields"]))
        read, size = self.indexer.progress()
        return {"folder": str(self.runs.folder.resolve()), "runs": rows, "read_bytes": read, "size_bytes": size}

    def curves(self, query: Query) -> str:
        """One field of several runs over steps, tokens or time, thinned to `width` pixel columns, as JSON."""
        names = list(query.get("run", ()))[:MAX_CURVES]
        is_many = len(names) > MANY
        field, over = _one_of(query, "field", VALUES, "loss"), _one_of(query, "x", tuple(AXES), "step")
        width = int(_number(query, "width", WIDTH_OF_MANY if is_many else WIDTH, low=16, high=MAX_WIDTH))
        means_alone = is_many and _first(query, "smoothed") == "1"
        low, high = _number(query, "low", -math.inf), _number(query, "high", math.inf)
        is_log = _first(query, "log") == "1"
        paths = self.runs.paths()
        shape = _Shape(field, AXES[over], width, low, high, is_log, means_alone)
        curves = ", ".join(self._kept(name, _known(name, paths), shape) for name in names)
        return f'{{"field": "{field}", "x": "{over}", "curves": [{curves}]}}'

    def report(self, name: str) -> str:
        """The run's report as it would be written now."""
        from weft.report.folder import is_server_run
        from weft.report.page import render

        path = _known(name, self.runs.paths())
        if is_server_run(path):
            from weft.report.server.page import build_server_page

            return render(build_server_page(path))
        from weft.report.training.page import build_training_page

        return render(build_training_page(path))

    def plan(self, query: Query) -> dict[str, Any]:
        return explorer.answered(explorer.explore, {key: values[0] for key, values in query.items()})

    def best(self, query: Query) -> dict[str, Any]:
        return explorer.answered(explorer.best, {key: values[0] for key, values in query.items()})

    def _kept(self, name: str, path: Path, shape: _Shape) -> str:
        index = self.indexer.open(path)
        if shape.is_zoomed:
            return _curve(name, index, shape)
        is_read, (read, size) = index.is_read, index.state
        state = (*index.file_state(), read if is_read else SAMPLED_STATES * read // size)
        key = (str(index.source), name, *shape)
        return self.kept.get(key, state, lambda: _curve(name, index, shape), saves=is_read)


def _curve(name: str, index: MetricsIndex, shape: _Shape) -> str:
    """As JSON."""
    rows, is_sampled = index.rows()
    x = rows[shape.over].astype(np.float64)
    first, last = np.searchsorted(x, shape.low, side="left"), np.searchsorted(x, shape.high, side="right")
    shown = slice(max(0, first - 1), last + 1)  # with a neighbour on each side: lines reach the edges
    y = rows[shape.field][shown].astype(np.float64)
    thinned = thin_curve(x[shown], y, width=shape.width, is_log=shape.is_log)
    left_out = ("x", "y") if shape.means_alone and len(thinned.mean_x) > 2 else ()
    facts = json.dumps({"run": name, "rows": len(rows), "sampled": is_sampled})
    values = (
        f'"{key}": {"[]" if key in left_out else _numbers(getattr(thinned, key), digits=digits)}'
        for key, digits in (("x", X_DIGITS), ("y", Y_DIGITS), ("mean_x", X_DIGITS), ("mean_y", Y_DIGITS))
    )
    return f"{facts[:-1]}, {', '.join(values)}}}"


def _numbers(values: Floats, *, digits: int) -> str:
    """JSON with the digits that the numbers have: half as long as that of float64."""
    return f"[{','.join(f'{value:.{digits}g}' for value in values.tolist())}]"


def _known(name: str, paths: Mapping[str, Path]) -> Path:
    """A run of the list; any other name is refused, so that no request can leave the folder."""
    found = paths.get(name)
    if found is None:
        raise RunFolderError(f"there is no run {name!r}", hint="reload the page")
    return found


def _first(query: Query, key: str) -> str:
    return next(iter(query.get(key, ())), "")


def _one_of(query: Query, key: str, known: Sequence[str], otherwise: str) -> str:
    found = _first(query, key) or otherwise
    if found not in known:
        raise BadValueError(f"there is no {key} {found!r}", hint=" | ".join(known))
    return found


def _number(query: Query, key: str, otherwise: float, *, low: float = -math.inf, high: float = math.inf) -> float:
    text = _first(query, key)
    try:
        found = float(text) if text else otherwise
    except ValueError:
        raise BadValueError(f"{key} is not a number: {text!r}", hint="give a number") from None
    if math.isnan(found):
        raise BadValueError(f"{key} is not a number: {text!r}", hint="give a number")
    return min(max(found, low), high)
