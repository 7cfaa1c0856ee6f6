"""The number of collectives a step is the definition of a ZeRO stage: 7 units, 4 micro-batches."""

from __future__ import annotations

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, global_batch

from weft.comm.observer import CollectiveObserver

UNITS, MICROBATCHES = 7, 4


def counts(rank: int, world: int, mesh: dict[str, int], zero: int) -> dict[str, int]:
    plan = {"mesh": mesh, "data_parallel": {"zero": zero}, "pipeline": {"microbatches": MICROBATCHES}}
    engine = build_engine("llama", plan)
    assert len(engine.layout.units) == UNITS
    for step in range(2):  # the first two steps set things up (DDP rebuilds its buckets)
        engine.step(engine.share_of(global_batch(step)))
    with CollectiveObserver() as seen:
        engine.step(engine.share_of(global_batch(2)))
    return dict(seen.counts)


COUNTS: list[tuple[dict[str, int], int, dict[str, int]]] = [
    ({"dp_shard": 2}, 1, {"all_gather": 7, "reduce_scatter": 7}),
    ({"dp_shard": 2}, 2, {"all_gather": 7, "reduce_scatter": 28}),
    ({"dp_shard": 2}, 3, {"all_gather": 56, "reduce_scatter": 28}),
    ({"dp_shard": 2, "dp_replicate": 2}, 1, {"all_gather": 7, "reduce_scatter": 7, "all_reduce": 7}),
    ({"dp_shard": 2, "dp_replicate": 2}, 2, {"all_gather": 7, "reduce_scatter": 28, "all_reduce": 7}),
    ({"dp_shard": 2, "dp_replicate": 2}, 3, {"all_gather": 56, "reduce_scatter": 28, "all_reduce": 7}),
    ({"dp_replicate": 2}, 0, {"all_reduce": 1}),  # one bucket holds this model
]


@pytest.mark.parametrize(("mesh", "zero", "expected"), by_default([COUNTS[2], COUNTS[6]], COUNTS))
def test_collectives_per_step(mesh: dict[str, int], zero: int, expected: dict[str, int]) -> None:
    world = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    found = run_ranks(counts, world, mesh, zero)[0]
    assert {name: count for name, count in found.items() if not name.startswith("small_")} == expected


def with_buckets(_rank: int, _world: int, mesh: dict[str, int], bucket_bytes: int) -> tuple[int, list[float]]:
    """All-reduces of the last step, large and small ones; losses and gradient norms."""
    plan = {
        "mesh": mesh,
        "data_parallel": {"bucket_bytes": bucket_bytes},
        "pipeline": {"microbatches": MICROBATCHES},
    }
    engine = build_engine("llama", plan)
    values = []
    for step in range(3):
        with CollectiveObserver() as seen:
            record = engine.step(engine.share_of(global_batch(step)))
        values += [record.loss, record.grad_norm]
    return sum(count for name, count in seen.counts.items() if name.endswith("all_reduce")), values


@pytest.mark.extended
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"dp_replicate": 2, "pp": 2}])
def test_buckets_have_the_size_of_the_plan(mesh: dict[str, int]) -> None:
    """Sums over two ranks have no order: the same bits for any bucket."""
    world = mesh["dp_replicate"] * mesh.get("pp", 1)
    (few, plain), (many, found) = (
        run_ranks(with_buckets, world, mesh, size, timeout_s=120)[0] for size in (25 * 2**20, 2**14)
    )
    assert many > few
    assert found == plain
