"""Which blocks, embeddings and micro-batches a pipeline rank holds, for every plan: three ranks stand for all.

The first rank has the embedding and the most micro-batches in flight, the last has the head and the logits, and
"middle" is the rank between them whose blocks hold the most: blocks seldom divide evenly, and DeepSeek's first ones are
dense where the others have experts. A V-shaped schedule has both ends on rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.stages import split_blocks
from weft.plan.columns import SCHEDULES, V_SHAPED, Bools, Columns, Floats
from weft.schedule import formulas

Place = Literal["first", "middle", "last"]
PLACES: tuple[Place, ...] = ("first", "middle", "last")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one pipeline rank holds, a row a plan."""

    blocks: Floats  # [plans, kinds]
    holds_embedding: Bools
    holds_head: Bools
    num_stages: Floats  # of the schedule, that the rank holds
    in_flight: Floats  # micro-batches whose activations the rank keeps at its peak, in units of all its blocks
    waiting: Floats  # those whose weights' gradients are still to come then, in the same units
    head_in_flight: Floats  # micro-batches in flight on the last stage; 0 on ranks without it
    versions: Floats  # weight versions kept, the current one included


def rank_at(shape: ModelShape, plan: Plan, place: Place) -> int:
    """The first global rank at this place of a plan's pipeline."""
    pipeline, pp = plan.pipeline, plan.mesh.pp
    rank = _rank_at(shape, pipeline.schedule, pp, pipeline.virtual_stages, place) if pp > 1 else 0
    return rank * (plan.num_ranks // pp)


def stage_of(shape: ModelShape, columns: Columns, *, place: Place) -> Stage:
    """The rank at this place of every plan's pipeline."""
    unique, inverse = columns.pipelines
    rows = [_stage_row(shape, SCHEDULES[s], int(p), int(v), int(m), place) for s, p, v, m in unique]
    table = np.asarray([row[0] for row in rows], dtype=np.float64)[inverse]
    facts = np.asarray([row[1:] for row in rows], dtype=np.float64)[inverse]
    return Stage(
        blocks=table,
        holds_embedding=facts[:, 0] > 0,
        holds_head=facts[:, 1] > 0,
        num_stages=facts[:, 2],
        in_flight=facts[:, 3],
        waiting=facts[:, 4],
        head_in_flight=facts[:, 5],
        versions=facts[:, 6],
    )


def bubble_of(columns: Columns) -> Floats:
    """The share of a step in which a rank of the pipeline waits, with equal stages; 0 without a pipeline."""
    unique, inverse = columns.pipelines
    shares = [_bubble(SCHEDULES[s], int(p), int(v), int(m)) for s, p, v, m in unique]
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
    shape: ModelShape, schedule: str, num_ranks: int, virtual_stages: int, microbatches: int, place: Place
) -> tuple[tuple[int, ...], bool, bool, float, float, float, float, float]:
    if num_ranks == 1:
        return shape.kind_counts, True, True, 1.0, 1.0, 0.0, 1.0, 1.0
    rank = _rank_at(shape, schedule, num_ranks, virtual_stages, place)
    chunks = chunks_of(schedule, rank=rank, num_ranks=num_ranks, virtual_stages=virtual_stages)
    num_chunks = num_ranks * len(chunks)
    blocks = _kinds_of_chunks(shape, num_chunks)
    counts = tuple(sum(blocks[chunk][kind] for chunk in chunks) for kind in range(len(shape.kinds)))
    sizes = {"num_ranks": num_ranks, "num_microbatches": microbatches, "virtual_stages": virtual_stages}
    whole, held = (
        formulas.rank_in_flight(schedule, rank=rank, until_weight=until_weight, **sizes)
        for until_weight in (False, True)
    )
    has_last = num_chunks - 1 in chunks
    losses = formulas.stage_in_flight(schedule, stage=num_chunks - 1, until_weight=False, **sizes) if has_last else 0
    versions = formulas.weight_versions(schedule, stage=rank, num_ranks=num_ranks)
    under_way = (float(whole / len(chunks)), float((held - whole) / len(chunks)), float(losses))
    return counts, 0 in chunks, has_last, float(len(chunks)), *under_way, float(versions)


@lru_cache(maxsize=4096)
def _rank_at(shape: ModelShape, schedule: str, num_ranks: int, virtual_stages: int, place: Place) -> int:
    if place != "middle" or num_ranks == 2:
        return 0 if place == "first" else num_ranks - 1

    def held(rank: int) -> int:
        chunks = chunks_of(schedule, rank=rank, num_ranks=num_ranks, virtual_stages=virtual_stages)
        blocks = _kinds_of_chunks(shape, num_ranks * len(chunks))
        return sum(
            count * kind.num_parameters
            for chunk in chunks
            for count, kind in zip(blocks[chunk], shape.kinds, strict=True)
        )

    return max(range(1, num_ranks - 1), key=held)


def chunks_of(schedule: str, *, rank: int, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The stages a rank holds: every num_ranks-th in a loop, one of each leg in a V."""
    if schedule in V_SHAPED:
        return rank, 2 * num_ranks - 1 - rank
    return tuple(rank + turn * num_ranks for turn in range(virtual_stages))


@lru_cache(maxsize=4096)
def _kinds_of_chunks(shape: ModelShape, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """How many blocks of each kind every chunk holds."""
    found, begin = [], 0
    for size in split_blocks(shape.num_layers, num_chunks):
        mine = shape.order[begin : begin + size]
        found.append(tuple(mine.count(kind) for kind in range(len(shape.kinds))))
        begin += size
    return tuple(found)
