"""Legality of a grid of tensor-parallel ranks: its sides, the hidden size, the family."""

from __future__ import annotations

import numpy as np

from weft.plan.axis import Rule
from weft.plan.columns import TP_MODES, Bools, Columns
from weft.plan.request import Request


def _tensor_mode_fits(request: Request, columns: Columns) -> Bools:
    tp = columns.tp
    square = np.sqrt(tp) == np.floor(np.sqrt(tp))
    cube = np.round(np.cbrt(tp)) ** 3 == tp
    layered = columns.tensor_depth > 1
    mode = columns.tp_mode
    return (
        ((mode == TP_MODES.index("2d")) & (~square | (tp == 1)))
        | ((mode == TP_MODES.index("2.5d")) & ~layered)
        | ((mode == TP_MODES.index("3d")) & (~cube | (tp == 1)))
    )


def _grid_fits(request: Request, columns: Columns) -> Bools:
    """Sides divide the hidden size, of a cube twice; the family was compared with one process on grids."""
    side = columns.tensor_side.astype(np.int64)
    hidden = request.shape.hidden_size % (side * np.where(columns.is_cube, side, 1)) != 0
    return columns.is_grid & (hidden | (not request.shape.has_grids))


RULES: tuple[Rule, ...] = (
    Rule("tensor_mode", "2d needs tp = q x q, 2.5d tp = d x q x q, 3d tp = q x q x q", _tensor_mode_fits),
    Rule(
        "grid",
        "a grid of tensor parallelism must divide the hidden size, and support the family",
        _grid_fits,
        lambda request, columns: "use tensor_parallel.mode = '1d'",
    ),
)
