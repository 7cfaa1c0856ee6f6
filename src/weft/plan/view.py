"""`View`: many plans at one of their pipeline ranks. Computed once, used by memory, traffic and time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.core.float8_section import Float8Choice
from weft.core.model_shape import BlockShape, ModelShape
from weft.plan.columns import FLOAT8, Bools, Columns, Floats, Ints
from weft.plan.memory.parameters import Share, share_of
from weft.plan.pp.stages import PLACES, Seen, Stage, stage_of
from weft.plan.request import ByteSizes, Request, byte_sizes
from weft.plan.time.float8 import multiplies_in_float8


@dataclass(frozen=True)
class View:
    """The rank at one place of the pipeline, for every plan of `columns`."""

    request: Request
    columns: Columns
    rows: Ints  # rows of these plans in the full table
    place: int  # index into PLACES
    stage: Stage
    share: Share
    trained: Share  # of it, what has gradients and optimizer states
    sizes: ByteSizes
    tokens: Floats  # per micro-batch and rank

    @property
    def shape(self) -> ModelShape:
        return self.request.shape

    @property
    def cast(self) -> Share:
        """The weights that unsharded strategies cast to the compute dtype: a low base rests in it."""
        return self.trained if self.shape.has_low_base else self.share

    @property
    def stream_bytes(self) -> Floats:
        """Bytes of the residual stream of one micro-batch."""
        ranks = np.where(self.columns.sequence_parallel > 0, self.columns.tp, 1)
        return np.asarray(self.tokens * self.sizes.residual * self.shape.hidden_size / ranks, dtype=np.float64)

    @cached_property
    def block_bytes(self) -> Floats:
        """Mean bytes per gathered element of a block: some weights are gathered in float8."""
        blocks = [self.shape.kinds[kind] for kind in self.shape.order]
        total = max(1, sum(block.num_parameters for block in blocks))
        experts = sum(linear.num_parameters for block in blocks for linear in block.linears if linear.role == "expert")
        in_unit = np.where(self.columns.ep > 1, max(1, total - experts), total)  # with ep a unit of their own
        sizes = np.asarray([sum(size for block in blocks for size in _in_float8(block, choice)) for choice in FLOAT8])
        share = sizes[self.columns.float8] / in_unit * (self.columns.shards > 1)
        in_codes = sum(
            (self.sizes.compute - linear.code_bytes) * linear.copies * linear.in_features * linear.out_features
            for block in blocks
            for linear in block.linears
            if linear.code_bytes
        )
        return np.asarray(self.sizes.compute - (self.sizes.compute - 1) * share - in_codes / in_unit, dtype=np.float64)

    @cached_property
    def num_in_float8(self) -> Floats:
        """Number of matrices on this rank that are gathered in float8; each has a scale."""
        counts = np.asarray([[len(_in_float8(kind, choice)) for choice in FLOAT8] for kind in self.shape.kinds])
        return np.asarray((self.stage.blocks * counts[:, self.columns.float8].T).sum(axis=1), dtype=np.float64)

    @property
    def has_codes(self) -> Bools:
        """Whether sharded weights travel as codes."""
        is_plain = self.columns.float8 == FLOAT8.index("none")
        return np.asarray(is_plain & (self.columns.zero > 0) & (self.sizes.gather is not None))

    def coded_bytes(self, elements: Floats, blocks: Floats, plain: Floats) -> Floats:
        """Bytes of gathered elements in these blocks on their way; `plain` where they do not travel as codes."""
        size = self.sizes.gather
        return plain if size is None else np.where(self.has_codes, elements * size.number + blocks * size.block, plain)

    def gathered_bytes(self, *, root: Floats, blocks: Floats) -> Floats:
        """Bytes of `root` and `blocks` gathered elements."""
        return np.asarray(root * self.sizes.compute + blocks * self.block_bytes, dtype=np.float64)


def _in_float8(block: BlockShape, choice: Float8Choice) -> list[int]:
    """Sizes of a block's matrices that are gathered in float8."""
    return [
        linear.in_features * linear.out_features
        for linear in block.linears
        for _ in range(linear.copies)
        if multiplies_in_float8(linear, choice)
    ]


def is_compiled(request: Request, columns: Columns) -> Bools:
    """Whether blocks save the activations of compiled ones. Models with dropout do not, even if the plan compiles;
    step times follow the plan, since other trainers have fused kernels with dropout. Experts behind a dispatcher, whose
    rows vary, are not compiled."""
    return (columns.compiled > 0) & (not request.shape.has_dropout) & (columns.ep == 1)


def views_of(request: Request, columns: Columns) -> list[View]:
    """The first rank of every plan; for pipelines also the middle and the last rank."""
    views = [view_at(request, columns, np.arange(len(columns)), place=0)]
    piped = np.flatnonzero(columns.pp > 1)
    if len(piped):
        subset = columns.take(piped)
        views += [view_at(request, subset, piped, place=place) for place in (1, 2)]
    return views


def busiest_view(request: Request, columns: Columns) -> View | None:
    """The rank between the ends whose blocks have the most FLOPs; None if it is the middle one.

    A token uses only some weights of an MoE block, so the fullest rank need not be the slowest.
    """
    weights = {kind.linear_flops_per_token / max(kind.num_parameters, 1) for kind in request.shape.kinds}
    rows = np.flatnonzero(columns.pp > 2)
    if len(weights) < 2 or not len(rows):
        return None
    return view_at(request, columns.take(rows), rows, place=PLACES.index("middle"), seen="busiest")


def view_at(request: Request, columns: Columns, rows: Ints, *, place: int, seen: Seen | None = None) -> View:
    """The view of the rank at `place`; `seen` names another rank."""
    columns = _as_run(columns)
    stage = stage_of(request.shape, columns, place=seen or PLACES[place])
    share = share_of(request.shape, columns, stage)
    trained = share_of(request.shape.trained, columns, stage) if request.shape.is_adapted else share
    batch_rows = request.workload.global_batch / (columns.dp * columns.microbatches)
    unit = columns.cp_multiple
    length = -(-request.workload.sequence_length // unit) * unit
    return View(
        request=request,
        columns=columns,
        rows=rows,
        place=place,
        stage=stage,
        share=share,
        trained=trained,
        sizes=byte_sizes(request),
        tokens=np.asarray(batch_rows * length / columns.cp, dtype=np.float64),
    )


def _as_run(columns: Columns) -> Columns:
    """Weights on the host come unit by unit as in ZeRO-3, on a rank with all of them too (`core/masters.py`)."""
    is_streamed = (columns.offload_parameters > 0) & (columns.zero == 0)
    return replace(columns, zero=np.where(is_streamed, 3, columns.zero)) if np.any(is_streamed) else columns
