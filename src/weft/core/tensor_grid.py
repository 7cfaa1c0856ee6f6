"""Grids of tensor parallelism: sides, coordinates and groups of ranks. Arithmetic only: no process groups, no torch.

    1d     t                               one dimension
    2d     (i, j) on q x q                 t = i q + j
    2.5d   (d, i, j), d layers of q x q    t = (d q + i) q + j
    3d     (i, j, k) on a cube of side q   t = (i q + j) q + k

The plan's formulas and the engine's groups both use it, so they cannot disagree on a grid.
"""

from __future__ import annotations

import math

from weft.core.errors import PlanError


def grid_sizes(mode: str, degree: int) -> dict[str, int]:
    """The sides of the grid of `degree` ranks; 2.5d uses the deepest grid with at least 2 x 2 ranks per layer."""
    if mode == "1d":
        return {"t": degree}
    if mode == "3d":
        side = round(degree ** (1 / 3))
        if side**3 != degree:
            raise _no_grid(mode, degree, "a cube", [n**3 for n in range(2, 9)])
        return {"i": side, "j": side, "k": side}
    if mode == "2d":
        side = math.isqrt(degree)
        if side**2 != degree:
            raise _no_grid(mode, degree, "a square", [n**2 for n in range(2, 17)])
        return {"i": side, "j": side}
    layers = tensor_depth(degree)
    if layers is None:
        raise _no_grid(mode, degree, "d layers of q x q with 1 < d <= q", _layered_degrees())
    side = math.isqrt(degree // layers)
    return {"d": layers, "i": side, "j": side}


def tensor_depth(degree: int) -> int | None:
    """The largest d with degree = d q^2 and 1 < d <= q, the range in which the paper's scheme is faster."""
    depths = [d for d in range(2, degree) if degree % d == 0 and math.isqrt(degree // d) ** 2 == degree // d]
    fitting = [d for d in depths if d <= math.isqrt(degree // d)]
    return max(fitting, default=None)


def place_of(sizes: dict[str, int], rank: int) -> dict[str, int]:
    place: dict[str, int] = {}
    for name, size in reversed(sizes.items()):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in sizes}


def rank_at(sizes: dict[str, int], place: dict[str, int]) -> int:
    rank = 0
    for name, size in sizes.items():
        rank = rank * size + place[name]
    return rank


def members(sizes: dict[str, int], place: dict[str, int], varying: str) -> list[int]:
    """Ranks of the axis that differ from `place` only in the `varying` coordinates, in order."""
    everyone = range(math.prod(sizes.values()))
    fixed = [name for name in sizes if name not in varying]
    return [rank for rank in everyone if all(place_of(sizes, rank)[name] == place[name] for name in fixed)]


def row_chunks(mode: str, degree: int) -> int:
    """The number of chunks into which a grid splits the rows of a batch; 1 for 1d."""
    sizes = grid_sizes(mode, degree) if degree > 1 else {}
    over = {"1d": "", "2d": "i", "2.5d": "di", "3d": "ij"}[mode]
    return math.prod(sizes[name] for name in over) if sizes else 1


def _layered_degrees() -> list[int]:
    return [d * q * q for q in range(2, 9) for d in range(2, q + 1)]


def _no_grid(mode: str, degree: int, what: str, legal: list[int]) -> PlanError:
    near = sorted(set(legal), key=lambda other: abs(other - degree))[:3]
    return PlanError(
        f"tensor_parallel.mode = {mode!r} needs tp to be {what}, but mesh.tp is {degree}",
        hint=f"use mesh.tp = {', '.join(str(value) for value in sorted(near))}, or mode = '1d'",
    )
