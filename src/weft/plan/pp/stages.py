"""Blocks, embeddings and micro-batches of a pipeline rank, for every plan: three ranks represent all.

The first rank has the embedding and the most micro-batches in flight, the last has the head and the logits, "middle" is
the rank between them with the most parameters: blocks seldom divide evenly, and DeepSeek's first ones are dense. A
V-shaped schedule has both ends on rank 0. Step times use a fourth, the "busiest" rank between the ends, whose blocks
have the most FLOPs; with MoE blocks it may be another than "middle".

Blocks are partitioned over stages by the plan (`pipeline.blocks`), else by cost, as in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import numpy as np

from weft.core.model_shape import ModelShape
from weft.core.plan import V_SHAPED, Plan
from weft.core.stages import partition_shape
from weft.plan.columns import Bools, Columns, Floats, PipelineKey
from weft.plan.memory.recompute import BlockRange, Recomputed
from weft.schedule import formulas

Place = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")
Seen = Place | Literal["busiest"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Contents of one pipeline rank, one row per plan."""

    blocks: Floats  # [plans, kinds]
    holds_embedding: Bools
    holds_head: Bools
    num_stages: Floats  # on the rank
    slots: Floats  # (stage, micro-batch) pairs in flight at the peak
    in_flight: Floats  # micro-batches in flight, in units of all blocks on the rank
    at_loss: Floats  # as in_flight while a loss is computed: one micro-batch on the last stage, if on this rank
    waiting: Floats  # those whose weight gradients (W) are pending, in the same units
    head_in_flight: Floats  # micro-batches in flight on the last stage; 0 on ranks without it
    versions: Floats  # weight versions, the current one included
    recomputed: Recomputed  # recomputed blocks


def rank_at(shape: ModelShape, plan: Plan, place: Place) -> int:
    """The first global rank at this place of the pipeline."""
    pipeline, pp = plan.pipeline, plan.mesh.pp
    key = PipelineKey(pipeline.schedule, pp, pipeline.virtual_stages, 0, pipeline.blocks or ())
    return (_rank_at(shape, key, place) if pp > 1 else 0) * (plan.num_ranks // pp)


def blocks_of(shape: ModelShape, plan: Plan) -> tuple[int, ...]:
    """Blocks per pipeline stage; () without a pipeline."""
    stages = plan.mesh.pp * plan.pipeline.virtual_stages
    return plan.pipeline.blocks or partition_shape(shape, stages) if plan.mesh.pp > 1 else ()


def stage_of(shape: ModelShape, columns: Columns, *, place: Seen) -> Stage:
    """The rank at this place of the pipeline, for every plan."""
    unique, inverse = columns.pipelines
    rows = [_stage_row(shape, key, place) for key in unique]
    table = np.asarray([row[0] for row in rows], dtype=np.float64)[inverse]
    facts = np.asarray([row[1:] for row in rows], dtype=np.float64)[inverse]
    return Stage(
        blocks=table,
        holds_embedding=facts[:, 0] > 0,
        holds_head=facts[:, 1] > 0,
        num_stages=facts[:, 2],
        slots=facts[:, 3],
        in_flight=facts[:, 4],
        at_loss=facts[:, 5],
        waiting=facts[:, 6],
        head_in_flight=facts[:, 7],
        versions=facts[:, 8],
        recomputed=Recomputed.of(
            columns, table, order=shape.order, ranges=[_block_ranges(shape, key, place) for key in unique]
        ),
    )


def bubble_of(columns: Columns) -> Floats:
    """The bubble as a share of the step, for equal stages; 0 without a pipeline."""
    unique, inverse = columns.pipelines
    shares = [_bubble(*key[:4]) for key in unique]
    return np.asarray(shares, dtype=np.float64)[inverse]


@lru_cache(maxsize=65536)
def _bubble(schedule: str, num_ranks: int, virtual_stages: int, microbatches: int) -> float:
    if num_ranks == 1:
        return 0.0
    return float(
        formulas.bubble_share(
            schedule, num_ranks=num_ranks, num_microbatches=microbatches, virtual_stages=virtual_stages
        )
    )


@lru_cache(maxsize=65536)
def _stage_row(
    shape: ModelShape, key: PipelineKey, place: Seen
) -> tuple[tuple[int, ...], bool, bool, float, float, float, float, float, float, float]:
    if key.num_ranks == 1:
        return shape.kind_counts, True, True, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0
    rank = _rank_at(shape, key._replace(microbatches=0), place)  # the rank does not depend on them
    chunks = _chunks(key, rank)
    num_chunks = key.num_ranks * len(chunks)
    blocks = _kinds_of_chunks(shape, num_chunks, key.stage_blocks)
    counts = _sum_of_kinds(blocks, chunks)
    sizes = {
        "num_ranks": key.num_ranks, "num_microbatches": key.microbatches, "virtual_stages": key.virtual_stages
    }  # fmt: skip
    in_flight, until_weights = (
        int(formulas.rank_in_flight(key.schedule, rank=rank, until_weight=until_weight, **sizes))
        for until_weight in (False, True)
    )
    stages = {
        chunk: int(formulas.stage_in_flight(key.schedule, stage=chunk, until_weight=False, **sizes)) for chunk in chunks
    }
    has_last = num_chunks - 1 in chunks
    versions = formulas.weight_versions(key.schedule, stage=rank, num_ranks=key.num_ranks)
    held_by = [(sum(blocks[chunk]), most) for chunk, most in stages.items()]
    weighed = (_weighed(in_flight, held_by), _weighed(in_flight, held_by, on_last=int(has_last)))
    under_way = (*weighed, (until_weights - in_flight) / len(chunks), float(stages[num_chunks - 1] if has_last else 0))
    return counts, 0 in chunks, has_last, float(len(chunks)), float(in_flight), *under_way, float(versions)


@lru_cache(maxsize=65536)
def _block_ranges(shape: ModelShape, key: PipelineKey, place: Seen) -> tuple[BlockRange, ...]:
    """Ranges of the model's blocks on the rank."""
    if key.num_ranks == 1:
        return ((0, shape.num_layers),)
    chunks = _chunks(key, _rank_at(shape, key._replace(microbatches=0), place))
    ends = [0, *accumulate(key.stage_blocks or partition_shape(shape, key.num_ranks * len(chunks)))]
    return tuple((ends[chunk], ends[chunk + 1]) for chunk in chunks)


def _weighed(slots: int, stages: list[tuple[int, int]], *, on_last: int = 0) -> float:
    """`slots` in units of all blocks on the rank, given (blocks, most slots) per stage.

    Their stages at the peak are assumed: `on_last` on the last one, of the others as many as possible on the largest.
    For equal stages this is exact.
    """
    *others, (last_blocks, last_most) = stages
    slots, total = slots - on_last, on_last * last_blocks
    least = min(blocks for blocks, _ in stages)
    for blocks, most in sorted([*others, (last_blocks, last_most - on_last)], reverse=True):
        taken = min(slots, most)
        slots, total = slots - taken, total + taken * blocks
    return (total + slots * least) / max(sum(blocks for blocks, _ in stages), 1)


@lru_cache(maxsize=4096)
def _rank_at(shape: ModelShape, key: PipelineKey, place: Seen) -> int:
    if place in ("first", "last") or key.num_ranks == 2:
        return 0 if place == "first" else key.num_ranks - 1
    weights = [kind.num_parameters if place == "middle" else kind.linear_flops_per_token for kind in shape.kinds]

    def held(rank: int) -> int:
        chunks = _chunks(key, rank)
        counts = _sum_of_kinds(_kinds_of_chunks(shape, key.num_ranks * len(chunks), key.stage_blocks), chunks)
        return sum(count * weight for count, weight in zip(counts, weights, strict=True))

    return max(range(1, key.num_ranks - 1), key=held)


def _chunks(key: PipelineKey, rank: int) -> tuple[int, ...]:
    return chunks_of(key.schedule, rank=rank, num_ranks=key.num_ranks, virtual_stages=key.virtual_stages)


def chunks_of(schedule: str, *, rank: int, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stages of a rank: every num_ranks-th in a loop, one per leg in a V."""
    if schedule in V_SHAPED:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(rank + turn * num_ranks for turn in range(virtual_stages))


@lru_cache(maxsize=4096)
def _kinds_of_chunks(shape: ModelShape, num_chunks: int, stage_blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Number of blocks of each kind per chunk."""
    found, begin = [], 0
    for size in stage_blocks or partition_shape(shape, num_chunks):
        mine = shape.order[begin : begin + size]
        found.append(tuple(mine.count(kind) for kind in range(len(shape.kinds))))
        begin += size
    return tuple(found)


def _sum_of_kinds(blocks: tuple[tuple[int, ...], ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(blocks[chunk] for chunk in chunks), strict=True)))
