"""An engine gives back the process groups that it made, and no others; another one trains after it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from torch.distributed.distributed_c10d import _world  # no public list of groups; for looking only, and only in a test
from torch.distributed.tensor import DTensor

PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
}
MIXED: dict[str, dict[str, Any]] = {
    "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 2}},
    "tp 2 x ZeRO-3": {"mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
    "grid": {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}},
    "tp 2 x pp 2": {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"microbatches": 2}},
}
Curve = list[tuple[float, float]]


def num_groups() -> int:
    return len(_world.pg_map)


def num_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@contextmanager
def nothing_left() -> Iterator[None]:
    before = num_groups()
    yield
    assert num_groups() == before


def gather_moments(engine: Any) -> None:
    """Over the mesh that DTensor remembers, which must not be one that is closed."""
    for state in engine.optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                value.full_tensor()


def in_turn(plans: dict[str, dict[str, Any]], folder: str) -> dict[str, list[Curve]]:
    """Two engines of each plan, one after the other."""
    curves: dict[str, list[Curve]] = {}
    for name, plan in plans.items():
        for turn in range(2):
            with nothing_left(), build_engine("qwen3-tied", plan) as engine:  # tied: a group for the shared weight
                curves.setdefault(name, []).append(train_steps(engine, 1))
                gather_moments(engine)
                if turn == 0:
                    engine.save(Path(folder, name))  # makes a group of its own
    return curves


def beside_another() -> tuple[Curve, Curve, float]:
    """An engine goes on when one of the same plan, and a group of the caller's, were beside it."""
    plan = {**PLANS["pp 2"], "data_parallel": {"zero": 1}}
    with build_engine("qwen3-tied", plan) as alone:
        expected = train_steps(alone, 2)
    with nothing_left():
        theirs = dist.new_group()
        with build_engine("qwen3-tied", plan) as stays:
            goes = build_engine("qwen3-tied", plan)
            found, _ = train_steps(stays, 1), train_steps(goes, 1)
            goes.close()
            goes.close()  # twice is once
            found += train_steps(stays, 1, first=1)
        total = torch.ones(())
        dist.all_reduce(total, group=theirs)
        dist.destroy_process_group(theirs)
    return expected, found, float(total)


def threads_after(count: int) -> list[int]:
    seen = []
    for _ in range(count):
        with build_engine("qwen3-tied", PLANS["pp 2"]) as engine:
            train_steps(engine, 1)
        del engine
        seen.append(num_threads())
    return seen


def left_by_an_error(rank: int) -> tuple[int, int]:
    """One rank fails inside the block, and must not wait there: groups that are left, and after all have closed."""
    before = num_groups()
    engine = build_engine("qwen3-tied", PLANS["pp 2"])
    left = -1
    try:
        with engine:
            train_steps(engine, 1)
            if rank == 0:
                raise ValueError("mine alone")
    except ValueError:
        left = num_groups() - before
        engine.close()  # the other rank is waiting there
    return left, num_groups() - before


def after_its_world(rank: int, world: int) -> int:
    """A world that ended took its groups along: nothing to close, in none and in the next."""
    engine = build_engine("qwen3-tied", {"mesh": {"dp_shard": 1}, "data_parallel": {"zero": 3}})
    engine.topology.checkpoint_group()
    engine.topology.groups.new(title="one more")
    dist.destroy_process_group()
    engine.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine.close()
    return num_groups()


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {
        "curves": in_turn(PLANS, folder),
        "beside": beside_another(),
        "threads": threads_after(2),
        "error": left_by_an_error(rank),
    }


def mixed(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {"curves": in_turn(MIXED, folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, str(tmp_path_factory.mktemp("close")))


def require_repeated(found: list[dict[str, Any]], plans: dict[str, dict[str, Any]]) -> None:
    for of_rank in found:
        assert set(of_rank["curves"]) == set(plans)
        for name, (first, second) in of_rank["curves"].items():
            assert first == second, name


def test_groups_are_given_back(found: list[dict[str, Any]]) -> None:
    require_repeated(found, PLANS)


@pytest.mark.slow
def test_groups_of_several_axes_are_given_back(tmp_path: Path) -> None:
    require_repeated(run_ranks(mixed, 4, str(tmp_path), timeout_s=120), MIXED)


def test_what_others_own_stays(found: list[dict[str, Any]]) -> None:
    for expected, curve, total in (of_rank["beside"] for of_rank in found):
        assert curve == expected
        assert total == 2.0


def test_threads_end_with_their_engine(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert len(set(of_rank["threads"])) == 1, of_rank["threads"]


def test_an_error_waits_for_nobody(found: list[dict[str, Any]]) -> None:
    assert found[0]["error"][0] > 0
    assert [of_rank["error"][1] for of_rank in found] == [0, 0]


def test_nothing_to_close_after_the_world_has_ended() -> None:
    assert run_ranks(after_its_world, 1) == [1]
