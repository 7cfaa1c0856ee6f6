"""Traffic of tensor parallelism on grids per step, as in the engine, for every plan.

2d, 2.5d on q x q (d layers), rows r = t / (q d); bytes by the ring factors of links.py:

| where         | forward                                        | backward                                        |
| ------------- | ---------------------------------------------- | ----------------------------------------------- |
| linear        | broadcast q x [r, in / q], q x block of weight | the same, and as much in reduces                |
| head          | broadcast table, reduce logits                 | broadcast logits' gradient, table; reduce table |
| token table   | all_gather ids, reduce_scatter [t / d, h / q]  | all_gather [t / d, h / q]                       |

3d on a cube of side q, rows r = t / q^2:

| linear, head  | all_gather [t / q, in / q], weight; reduce_scatter [t / q, out / q] | all_gather of all three; reduce_scatter of two |
| token table   | all_gather ids, reduce_scatter [t, h / q] over q^2 ranks            | all_gather [t, h / q]                          |

All modes: a norm reduces its statistics [r] float32 both ways, the loss three elements per row; recompute repeats a
block's forward; once per step gradients of vectors are summed over the ranks with other rows, in 2.5d those of matrices
over the layers.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.core.model_shape import BlockShape, LinearShape, NormShape
from weft.plan.axis import SMALL_ELEMENTS, TrafficRow
from weft.plan.columns import Bools, Floats
from weft.plan.memory.block_tensors import is_wide
from weft.plan.time.links import gather_bytes, passed_bytes, reduce_bytes
from weft.plan.tp.traffic import ALONE_ELEMENTS, FLOAT32_BYTES, INDEX_BYTES, Sent, collected
from weft.plan.view import View

Passed = tuple[str, Floats, Floats]  # collective, bytes, count
Group = Literal["stream", "region", "replicated"]


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """The sides of every plan's grid, and the rows per rank."""

    view: View
    is_cube: Bools
    side: Floats
    layers: Floats

    @property
    def rows(self) -> Floats:
        return np.asarray(self.view.tokens / (self.side * np.where(self.is_cube, self.side, self.layers)))

    @property
    def row_ranks(self) -> Floats:
        """Ranks that hold the same features of other rows."""
        return np.where(self.is_cube, self.side**2, self.side * self.layers)


def traffic(view: View) -> list[TrafficRow]:
    """All collectives of the grids; zero for plans with mode 1d."""
    return collected(_sent(view))


def _sent(view: View) -> Iterator[Sent]:
    columns = view.columns
    is_grid = columns.is_grid
    if not np.any(is_grid):
        return
    layers = columns.tensor_depth.astype(np.float64)
    grid = _Grid(view=view, is_cube=columns.is_cube, side=columns.tensor_side, layers=layers)
    for name, phase, nbytes, count in (*_steps(grid), *_update(grid)):
        yield name, phase, np.where(is_grid, nbytes, 0.0), np.where(is_grid, count, 0.0)


def _steps(grid: _Grid) -> Iterator[Sent]:
    view = grid.view
    microbatches = view.columns.microbatches.astype(np.float64)
    recomputed = view.stage.recomputed.full + view.stage.recomputed.selective
    for index, block in enumerate(view.shape.kinds):
        count = view.stage.blocks[:, index]
        yield from _in_phase(_block(grid, block, is_forward=True), "forward", microbatches * count)
        yield from _in_phase(_block(grid, block, is_forward=True), "backward", microbatches * recomputed[:, index])
        yield from _in_phase(_block(grid, block, is_forward=False), "backward", microbatches * count)
    yield from _in_phase(_table(grid, is_forward=True), "forward", microbatches * view.stage.holds_embedding)
    yield from _in_phase(_table(grid, is_forward=False), "backward", microbatches * view.stage.holds_embedding)
    yield from _in_phase(_head(grid, is_forward=True), "forward", microbatches * view.stage.holds_head)
    yield from _in_phase(_head(grid, is_forward=False), "backward", microbatches * view.stage.holds_head)


def _in_phase(passed: Iterator[Passed], phase: str, times: Floats) -> Iterator[Sent]:
    for name, nbytes, count in passed:
        yield name, phase, nbytes * times, count * times


def _block(grid: _Grid, block: BlockShape, *, is_forward: bool) -> Iterator[Passed]:
    for linear in block.linears:
        if linear.style != "replicated":
            yield from _linear(grid, linear, is_forward=is_forward)
    for norm in block.norms:
        if norm.place == "residual" or is_wide(norm, block):
            yield _norm(grid, norm.kind, is_forward=is_forward)


def _linear(grid: _Grid, linear: LinearShape, *, is_forward: bool) -> Iterator[Passed]:
    inputs, outputs = linear.in_features / grid.side, linear.out_features / grid.side
    yield from _matmul(grid, inputs, outputs, is_forward=is_forward)


def _matmul(grid: _Grid, inputs: Floats, outputs: Floats, *, is_forward: bool) -> Iterator[Passed]:
    """A matmul with blocks of inputs x outputs: panel by panel on a square, all-gathered on a cube."""
    view, side = grid.view, grid.side
    weight = inputs * outputs * view.sizes.compute
    panels = passed_bytes(side * (grid.rows * inputs * view.sizes.activation + weight), side) * ~grid.is_cube
    passes = 2 * side * ~grid.is_cube
    yield "broadcast", panels, passes
    tokens = view.tokens / side * view.sizes.activation
    moved = [gather_bytes(part, side) * grid.is_cube for part in (tokens * inputs, weight, tokens * outputs)]
    ones = grid.is_cube.astype(np.float64)
    if is_forward:
        yield "all_gather", moved[0] + moved[1], 2 * ones
        yield "reduce_scatter", moved[2], ones
        return
    yield "reduce", panels, passes
    yield "all_gather", moved[0] + moved[1] + moved[2], 3 * ones
    yield "reduce_scatter", moved[0] + moved[1], 2 * ones


def _norm(grid: _Grid, kind: str, *, is_forward: bool) -> Passed:
    """All-reduce of a norm's statistics: mean of squares, for layer norms also the mean; one in a fused backward."""
    numbers = 2.0 if kind == "layer" else 1.0
    nbytes = reduce_bytes(numbers * FLOAT32_BYTES * grid.rows, grid.side)
    is_apart = is_forward or _writes_norms_out(grid.view)
    return "all_reduce", nbytes, np.full(len(nbytes), numbers if is_apart else 1.0)


def _writes_norms_out(view: View) -> bool:
    """Whether layer norms are written out in Python, as Cohere's."""
    norms = [norm for block in view.shape.kinds for norm in block.norms]
    return any(norm.kind == "layer" and not norm.is_fused for norm in norms)


def _table(grid: _Grid, *, is_forward: bool) -> Iterator[Passed]:
    view = grid.view
    tokens = np.where(grid.is_cube, view.tokens, view.tokens / grid.layers)
    ranks = np.where(grid.is_cube, grid.side**2, grid.side)
    ones = np.ones(len(tokens))
    found = gather_bytes(tokens * view.shape.hidden_size / grid.side * view.sizes.activation, ranks)
    if is_forward:
        yield "all_gather", gather_bytes(tokens * INDEX_BYTES, ranks), ones
        yield "reduce_scatter", found, ones
    else:
        yield "all_gather", found, ones


def _head(grid: _Grid, *, is_forward: bool) -> Iterator[Passed]:
    """Collectives of the final norm, the head and the loss."""
    view, side = grid.view, grid.side
    shape, sizes = view.shape, view.sizes
    yield _norm(grid, shape.final_norm, is_forward=is_forward)
    is_flat = (~grid.is_cube).astype(np.float64)
    table = passed_bytes(shape.vocab_size * shape.hidden_size / side * sizes.compute, side) * is_flat
    logits = passed_bytes(grid.rows * shape.vocab_size * sizes.activation, side) * is_flat
    padded = np.ceil(shape.vocab_size / side**2) * side  # of one line of a cube
    for name, nbytes, count in _matmul(grid, shape.hidden_size / side, padded, is_forward=is_forward):
        yield name, nbytes * grid.is_cube, count * grid.is_cube
    if not is_forward:
        yield "broadcast", logits + table, 2 * side * is_flat
        yield "reduce", table, side * is_flat
        return
    yield "broadcast", table, side * is_flat
    yield "reduce", logits, side * is_flat
    is_sharded = (view.columns.loss_parallel > 0).astype(np.float64)
    yield "all_reduce", reduce_bytes(3 * FLOAT32_BYTES * grid.rows, side) * is_sharded, 2 * is_sharded
    chunk = np.where(grid.is_cube, padded, np.ceil(shape.vocab_size / side))
    yield (
        "all_gather",
        gather_bytes(grid.rows * chunk * side * sizes.activation, side) * (1 - is_sharded),
        1 - is_sharded,
    )


def _update(grid: _Grid) -> Iterator[Sent]:
    """Gradient all-reduces: vectors over other rows, replicated ones over all ranks, matrices over layers of 2.5d."""
    view = grid.view
    size = len(view.columns)
    sums: dict[Group, Floats] = {"stream": np.zeros(size), "region": np.zeros(size), "replicated": np.zeros(size)}
    for numbers, group, count in _all_vectors(view):
        own = numbers / grid.side if group != "replicated" else np.full(size, float(numbers))
        sums[group] = sums[group] + (_shard(grid, own) + 1) * count
    # on a square both kinds of vectors are summed over the same ranks in one all-reduce
    sums["stream"] = sums["stream"] + np.where(grid.is_cube, 0.0, sums["region"])
    sums["region"] = np.where(grid.is_cube, sums["region"], 0.0)
    matrices, alone = _matrices(grid)
    everyone = view.columns.tp.astype(np.float64)
    for elements, ranks in (
        (sums["stream"], grid.row_ranks), (sums["region"], grid.row_ranks), (sums["replicated"], everyone),
        (matrices, grid.layers),
    ):  # fmt: skip
        nbytes = reduce_bytes(elements * view.sizes.gradient, ranks) * (elements > SMALL_ELEMENTS)
        yield "all_reduce", "update", nbytes, (nbytes > 0).astype(np.float64)
    yield "all_reduce", "update", np.zeros(size), alone * (grid.layers > 1)


def _matrices(grid: _Grid) -> tuple[Floats, Floats]:
    """(elements of all matrices, number of matrices that are reduced alone)."""
    shape, size = grid.view.shape, len(grid.view.columns)
    found, alone = np.zeros(size), np.zeros(size)
    tables = np.ceil(shape.vocab_size / grid.side) * shape.hidden_size / grid.side
    held = [(tables, np.full(size, 1.0 if shape.tied_head else 2.0))]
    for index, block in enumerate(shape.kinds):
        count = grid.view.stage.blocks[:, index]
        held += [(one.in_features * one.out_features / grid.side**2, count) for one in block.linears]
    for elements, count in held:
        own = _shard(grid, elements)
        found, alone = found + (own + 1) * count, alone + (own > ALONE_ELEMENTS) * count
    return found, alone


def _shard(grid: _Grid, elements: Floats) -> Floats:
    return np.ceil(elements / grid.view.columns.shards)


def _all_vectors(view: View) -> Iterator[tuple[float, Group, Floats]]:
    """(elements, group of ranks, count) of all parameters that are no matrices."""
    ones = np.ones(len(view.columns))
    for extra in view.shape.outside:  # final norms, positions
        yield extra.num_parameters / extra.num_tensors, "stream", extra.num_tensors * ones
    if view.shape.head_bias:
        yield view.shape.vocab_size, "region", ones
    for index, block in enumerate(view.shape.kinds):
        for elements, group in _vectors(block):
            yield elements, group, view.stage.blocks[:, index]


def _vectors(block: BlockShape) -> Iterator[tuple[int, Group]]:
    """Weights and biases of norms, and biases of linears."""
    for norm in block.norms:
        tensors = norm.num_parameters // norm.size if norm.size else 0
        heads = norm.per if tensors >= norm.per else 1  # weights per head are one tensor
        for _ in range(tensors // heads):
            yield norm.size * heads, _group_of(norm, block)
    for linear in block.linears:
        if linear.bias:
            yield linear.out_features, "region" if linear.style == "column" else "stream"
    for extra in block.extras:
        yield extra.num_parameters, "region" if extra.style != "replicated" else "replicated"


def _group_of(norm: NormShape, block: BlockShape) -> Group:
    if norm.place == "residual":
        return "stream"
    has_own_heads = norm.per > 1 and norm.num_parameters >= norm.per * norm.size
    return "region" if has_own_heads or is_wide(norm, block) else "replicated"
