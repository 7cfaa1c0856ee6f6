"""The answers of the server, as values: the table of runs, curves, a run's report, the plan explorer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import BadValueError, RunFolderError
from weft.ui import explorer
from weft.ui.indexer import Indexer
from weft.ui.runs import RunList
from weft.ui.thinning import thin_curve
from weft.ui.values import VALUES

AXES = {"step": "step", "tokens": "tokens", "time": "seconds"}
MAX_WIDTH, MAX_CURVES = 4_000, 400
Query = Mapping[str, Sequence[str]]


class PageData:
    """One method per path of the server."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.runs, self.indexer = RunList(folder), Indexer(cache)

    def table(self) -> dict[str, Any]:
        """Every run, with the progress of the index."""
        rows = self.runs.rows()
        for row, path in zip(rows, self.runs.paths().values(), strict=False):
            if row["size"]:
                row["fields"] = sorted(self.indexer.open(path).fields.union(row["fields"]))
        read, size = self.indexer.progress()
        return {"folder": str(self.runs.folder.resolve()), "runs": rows, "read_bytes": read, "size_bytes": size}

    def curves(self, query: Query) -> dict[str, Any]:
        """One field of several runs over steps, tokens or time, thinned to `width` pixel columns."""
        field, over = _one_of(query, "field", VALUES, "loss"), _one_of(query, "x", tuple(AXES), "step")
        width = int(_number(query, "width", 600, low=16, high=MAX_WIDTH))
        low, high = _number(query, "low", -math.inf), _number(query, "high", math.inf)
        is_log = _first(query, "log") == "1"
        paths = self.runs.paths()
        curves = [
            self._curve(name, _known(name, paths), field, AXES[over], width=width, low=low, high=high, is_log=is_log)
            for name in list(query.get("run", ()))[:MAX_CURVES]
        ]
        return {"field": field, "x": over, "curves": curves}

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

    def _curve(
        self, name: str, path: Path, field: str, over: str, *, width: int, low: float, high: float, is_log: bool
    ) -> dict[str, Any]:
        rows, is_sampled = self.indexer.open(path).rows()
        x = rows[over].astype(np.float64)
        first, last = np.searchsorted(x, low, side="left"), np.searchsorted(x, high, side="right")
        shown = slice(max(0, first - 1), last + 1)  # with a neighbour on each side: lines reach the edges
        thinned = thin_curve(x[shown], rows[field][shown].astype(np.float64), width=width, is_log=is_log)
        return {
            "run": name,
            "rows": len(rows),
            "sampled": is_sampled,
            **{key: getattr(thinned, key).tolist() for key in ("x", "y", "mean_x", "mean_y")},
        }


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
