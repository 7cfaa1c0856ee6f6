"""Legality of a pipeline: stages have blocks, and the schedule supports stages and micro-batches."""

from __future__ import annotations

import numpy as np

from weft.plan.axis import Rule
from weft.plan.columns import LOOPED, SCHEDULES, Bools, Columns
from weft.plan.request import Request


def _stages_have_blocks(request: Request, columns: Columns) -> Bools:
    stages = columns.pp * np.where(columns.is_v_shaped, 2, columns.virtual_stages)
    return stages > request.shape.num_layers


def _blocks_add_up(request: Request, columns: Columns) -> Bools:
    """A given partition has one number per stage, and their sum is the number of blocks."""
    lengths, totals = (
        np.asarray([of(partition) for partition in columns.partitions], dtype=np.int64) for of in (len, sum)
    )
    stages = columns.pp * columns.virtual_stages
    wrong = (lengths[columns.partition] != stages) | (totals[columns.partition] != request.shape.num_layers)
    return (columns.partition > 0) & wrong


def _virtual_stages_suit(request: Request, columns: Columns) -> Bools:
    looped = np.isin(columns.schedule, [SCHEDULES.index(name) for name in LOOPED])
    v = columns.virtual_stages
    wants_one = ~looped & ~columns.is_v_shaped
    return (
        (wants_one & (v != 1))
        | (columns.is_v_shaped & (v != 2))
        | (looped & (columns.pp > 1) & (v < 2))
        | ((columns.pp == 1) & (v != 1))
    )


def _microbatches_suit(request: Request, columns: Columns) -> Bools:
    m, p = columns.microbatches, columns.pp
    is_pipeline = p > 1
    return is_pipeline & (
        (columns.named("interleaved_1f1b") & (m % p != 0))
        | (columns.named("dualpipev") & (m < 2 * p))
        | ((columns.named("zbv") | columns.named("pipedream_2bw")) & (m < p))
    )


def _gathers_with_pipeline(request: Request, columns: Columns) -> Bools:
    """Asynchronous pipelines keep several unsharded weight versions."""
    is_async = columns.named("pipedream") | columns.named("pipedream_2bw")
    return is_async & (columns.zero > 0) & (columns.pp > 1)


def _tied_copies_update_at_once(request: Request, columns: Columns) -> Bools:
    """Stages of pipedream update one after the other, and a tied table is on two."""
    return (columns.pp > 1) & columns.named("pipedream") & request.shape.tied_head


def _numbers_of_blocks(request: Request, columns: Columns) -> str:
    stages, blocks = int(columns.pp[0] * columns.virtual_stages[0]), request.shape.num_layers
    return f"set {stages} numbers, each at least 1, with sum {blocks}; [] partitions by cost"


RULES: tuple[Rule, ...] = (
    Rule(
        "stages",
        "every pipeline stage needs a block",
        _stages_have_blocks,
        lambda request, columns: f"pp x virtual_stages may be at most {request.shape.num_layers}",
    ),
    Rule(
        "blocks",
        "pipeline.blocks does not partition all blocks of the model over the stages",
        _blocks_add_up,
        lambda request, columns: _numbers_of_blocks(request, columns),
    ),
    Rule("virtual_stages", "the schedule does not support that many stages per rank", _virtual_stages_suit),
    Rule("microbatches", "the schedule does not support that many micro-batches", _microbatches_suit),
    Rule(
        "asynchronous",
        "an asynchronous pipeline keeps unsharded weights, so it supports no ZeRO stage",
        _gathers_with_pipeline,
    ),
    Rule(
        "tied_updates",
        "pipedream updates each stage separately, and the first and the last stage share a tied table",
        _tied_copies_update_at_once,
        lambda request, columns: "set pipeline.schedule = 'pipedream_2bw', or take a model whose head is not tied",
    ),
)
