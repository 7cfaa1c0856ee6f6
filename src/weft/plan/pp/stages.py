"""Which blocks, embeddings and micro-batches a pipeline rank holds, for every plan: three ranks stand for all.

The first rank has the embedding and the most micro-batches in flight, the last has the head and the logits, and
"middle" is the rank between them whose blocks hold the most: blocks seldom divide evenly, and DeepSeek's first ones are
dense where the others have experts. A V-shaped schedule has both ends on rank 0. For step times there is a fourth, the
"busiest" rank between the ends, whose blocks cost a token the most: where experts are, it may be another.

Blocks are dealt to stages as the plan says (`pipeline.blocks`), else by the cost that the engine deals by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import numpy as np

from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.stages import partition_shape
from weft.plan.columns import V_SHAPED, Bools, Columns, Floats, PipelineKey
from weft.plan.memory.recompute import Again, Stretch
from weft.schedule import formulas

Place = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")
Seen = Place | Literal["busiest"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one pipeline rank holds, a row a plan."""

    blocks: Floats  # [plans, kinds]
    holds_embedding: Bools
    holds_head: Bools
    num_stages: Floats  # of the schedule, that the rank holds
    slots: Floats  # (stage, micro-batch) pairs whose activations the rank keeps at its peak
    in_flight: Floats  # these activations, in units of all its blocks
    at_loss: Floats  # as in_flight, with one micro-batch on the last stage if that is here: a loss is being computed
    waiting: Floats  # those whose weights' gradients are still to come then, in the same units
    head_in_flight: Floats  # micro-batches in flight on the last stage; 0 on ranks without it
    versions: Floats  # weight versions kept, the current one included
    again: Again  # which of the blocks are computed again


def rank_at(shape: ModelShape, plan: Plan, place: Place) -> int:
    """The first global rank at this place of a plan's pipeline."""
    pipeline, pp = plan.pipeline, plan.mesh.pp
    key = PipelineKey(pipeline.schedule, pp, pipeline.virtual_stages, 0, pipeline.blocks or ())
    return (_rank_at(shape, key, place) if pp > 1 else 0) * (plan.num_ranks // pp)


def blocks_of(shape: ModelShape, plan: Plan) -> tuple[int, ...]:
    """Blocks of each stage of a plan's pipeline, as they are dealt; none without one."""
    stages = plan.mesh.pp * plan.pipeline.virtual_stages
    return plan.pipeline.blocks or partition_shape(shape, stages) if plan.mesh.pp > 1 else ()


def stage_of(shape: ModelShape, columns: Columns, *, place: Seen) -> Stage:
    """The rank at this place of every plan's pipeline."""
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
        again=Again.of(columns, table, order=shape.order, stretches=[_stretches(shape, key, place) for key in unique]),
    )


def bubble_of(columns: Columns) -> Floats:
    """The share of a step in which a rank of the pipeline waits, with equal stages; 0 without a pipeline."""
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
    rank = _rank_at(shape, key._replace(microbatches=0), place)  # which do not matter to it
    chunks = _chunks(key, rank)
    num_chunks = key.num_ranks * len(chunks)
    blocks = _kinds_of_chunks(shape, num_chunks, key.deal)
    counts = _sum_of_kinds(blocks, chunks)
    sizes = {
        "num_ranks": key.num_ranks, "num_microbatches": key.microbatches, "virtual_stages": key.virtual_stages
    }  # fmt: skip
    whole, held = (
        int(formulas.rank_in_flight(key.schedule, rank=rank, until_weight=until_weight, **sizes))
        for until_weight in (False, True)
    )
    stages = {
        chunk: int(formulas.stage_in_flight(key.schedule, stage=chunk, until_weight=False, **sizes)) for chunk in chunks
    }
    has_last = num_chunks - 1 in chunks
    versions = formulas.weight_versions(key.schedule, stage=rank, num_ranks=key.num_ranks)
    held_by = [(sum(blocks[chunk]), most) for chunk, most in stages.items()]
    weighed = (_weighed(whole, held_by), _weighed(whole, held_by, on_last=int(has_last)))
    under_way = (*weighed, (held - whole) / len(chunks), float(stages[num_chunks - 1] if has_last else 0))
    return counts, 0 in chunks, has_last, float(len(chunks)), float(whole), *under_way, float(versions)


@lru_cache(maxsize=65536)
def _stretches(shape: ModelShape, key: PipelineKey, place: Seen) -> tuple[Stretch, ...]:
    """Which of the model's blocks the rank holds, as they lie together."""
    if key.num_ranks == 1:
        return ((0, shape.num_layers),)
    chunks = _chunks(key, _rank_at(shape, key._replace(microbatches=0), place))
    ends = [0, *accumulate(key.deal or partition_shape(shape, key.num_ranks * len(chunks)))]
    return tuple((ends[chunk], ends[chunk + 1]) for chunk in chunks)


def _weighed(slots: int, stages: list[tuple[int, int]], *, on_last: int = 0) -> float:
    """Micro-batches of all of a rank's blocks that `slots` are worth, of (blocks, most slots) of each of its stages.

    Which stages they are of at the peak is not asked of the schedule: `on_last` are of the last one, of the others as
    many as may be of the largest. Where stages are equal that is no matter.
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
        counts = _sum_of_kinds(_kinds_of_chunks(shape, key.num_ranks * len(chunks), key.deal), chunks)
        return sum(count * weight for count, weight in zip(counts, weights, strict=True))

    return max(range(1, key.num_ranks - 1), key=held)


def _chunks(key: PipelineKey, rank: int) -> tuple[int, ...]:
    return chunks_of(key.schedule, rank=rank, num_ranks=key.num_ranks, virtual_stages=key.virtual_stages)


def chunks_of(schedule: str, *, rank: int, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The stages a rank holds: every num_ranks-th in a loop, one of each leg in a V."""
    if schedule in V_SHAPED:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(rank + turn * num_ranks for turn in range(virtual_stages))


@lru_cache(maxsize=4096)
def _kinds_of_chunks(shape: ModelShape, num_chunks: int, deal: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """How many blocks of each kind every chunk holds."""
    found, begin = [], 0
    for size in deal or partition_shape(shape, num_chunks):
        mine = shape.order[begin : begin + size]
        found.append(tuple(mine.count(kind) for kind in range(len(shape.kinds))))
        begin += size
    return tuple(found)


def _sum_of_kinds(blocks: tuple[tuple[int, ...], ...], chunks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(blocks[chunk] for chunk in chunks), strict=True)))
