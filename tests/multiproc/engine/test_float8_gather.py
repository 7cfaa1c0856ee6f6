"""Weights that travel in float8: the bits of a run whose weights travel as they are, in half the bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, global_batch

import weft.engine.kernels.compiled as compiled
from weft.comm.observer import CollectiveObserver
from weft.engine.engine import Engine
from weft.engine.ownership import local

CASES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"data_parallel": {"zero": 3}},
    "ZeRO-2, compiled": {"data_parallel": {"zero": 2}, "compile": {"enabled": True}},
    "ZeRO-3, compiled, recomputed": {
        "data_parallel": {"zero": 3}, "compile": {"enabled": True}, "activations": {"policy": "full"},
    },
    "ZeRO-1": {"data_parallel": {"zero": 1}},
    "a pipeline": {
        "mesh": {"dp_shard": 2, "pp": 2}, "data_parallel": {"zero": 2},
        "pipeline": {"schedule": "1f1b", "microbatches": 2},
    },
    "replicas": {"mesh": {"dp_shard": 2, "dp_replicate": 2}},
}  # fmt: skip
Found = tuple[list[float], list[str], int, dict[str, int], list[str]]


def trained(rank: int, world: int, case: str) -> tuple[Found, Found]:
    compiled.BACKEND = "aot_eager"
    return _trained(case, "weights"), _trained(case, "float8")


def _trained(case: str, gather: str) -> Found:
    given: dict[str, Any] = {"mesh": {"dp_shard": 2}, "pipeline": {"microbatches": 2}, **CASES[case]}
    engine = build_engine(
        "llama", {**given, "precision": {"preset": "bf16"}, "float8": {"linears": "all", "gather": gather}}
    )
    values = []
    for step in range(4):
        record = engine.step(engine.share_of(global_batch(step)))
        values += [record.loss, record.grad_norm]
        if step == 1:
            values.append(engine.evaluate(engine.share_of(global_batch(9))).loss)
        if step == 2:
            with torch.no_grad():  # as a checkpoint is loaded: the scales of before are not those of now
                for parameter in engine.parameters:
                    parameter.mul_(1.5)
    with CollectiveObserver() as seen:
        engine.step(engine.share_of(global_batch(5)))
    wrong = [f"{row.component} {row.found}" for row in engine.dtypes() if not row.ok]
    return values, _digests(engine), engine.strategy.num_in_float8, dict(seen.counts), wrong


def _digests(engine: Engine) -> list[str]:
    """Of this rank's shards of weights and states."""
    shards = (np.asarray(local(value.detach())) for _, value in sorted(engine.state().items()))
    return [hashlib.sha256(shard.tobytes()).hexdigest() for shard in shards]


@pytest.mark.parametrize("case", by_default([], list(CASES), extended=[]))
def test_the_bits_are_those_of_weights_that_travel_as_they_are(case: str) -> None:
    mesh = CASES[case].get("mesh", {"dp_shard": 2})
    world = mesh["dp_shard"] * mesh.get("dp_replicate", 1) * mesh.get("pp", 1)
    whole, found = run_ranks(trained, world, case, timeout_s=120.0)[0]
    assert found[:2] == whole[:2]
    assert (whole[2], found[2]) == (0, 28 if "pp" in mesh else 42)  # the first stage has four of six blocks
    assert not found[4]
    assert found[3].get("all_reduce", 0) == whole[3].get("all_reduce", 0) + 1, "one for the scales of all weights"
    assert found[3]["all_gather"] == whole[3]["all_gather"]
