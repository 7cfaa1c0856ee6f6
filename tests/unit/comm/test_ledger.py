"""Bytes sent per rank, from the very operators of a collective on a fake group of four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch

NUM_RANKS, ELEMENTS = 4, 120
S = 4 * ELEMENTS


@pytest.fixture(params=[0, 2])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=NUM_RANKS)
    yield request.param
    dist.destroy_process_group()


def parts() -> list[torch.Tensor]:
    return list(torch.zeros(ELEMENTS).chunk(NUM_RANKS))


def scatter(rank: int) -> None:
    dist.scatter(torch.zeros(ELEMENTS // 4), parts() if rank == 2 else None, src=2)


def gather(rank: int) -> None:
    dist.gather(torch.zeros(ELEMENTS // 4), parts() if rank == 2 else None, dst=2)


def to_all_unevenly(_rank: int) -> None:
    rows = [10, 20, 30, 60]
    dist.all_to_all_single(torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), [30] * 4, rows)


CASES: dict[str, tuple[Callable[[int], object], str, dict[int, int]]] = {
    "all_reduce": (lambda _: dist.all_reduce(torch.zeros(ELEMENTS)), "all_reduce", {0: 6 * S // 4, 2: 6 * S // 4}),
    "broadcast": (lambda _: dist.broadcast(torch.zeros(ELEMENTS), src=0), "broadcast", {0: S, 2: S}),
    "reduce": (lambda _: dist.reduce(torch.zeros(ELEMENTS), dst=0), "reduce", {0: S, 2: S}),
    "all_gather": (lambda _: dist.all_gather(parts(), parts()[0]), "all_gather", {0: 3 * S // 4, 2: 3 * S // 4}),
    "reduce_scatter": (
        lambda _: dist.reduce_scatter(parts()[0], parts()),
        "reduce_scatter",
        {0: 3 * S // 4, 2: 3 * S // 4},
    ),
    "scatter": (scatter, "scatter", {0: 0, 2: 3 * S // 4}),
    "gather": (gather, "gather", {0: S // 4, 2: 0}),
    "all_to_all": (
        lambda _: dist.all_to_all_single(torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)),
        "all_to_all",
        {0: 3 * S // 4, 2: 3 * S // 4},
    ),
    "all_to_all of lists": (
        lambda _: dist.all_to_all(parts(), parts()), "all_to_all", {0: 3 * S // 4, 2: 3 * S // 4}
    ),
    "uneven all_to_all": (to_all_unevenly, "all_to_all", {0: 4 * 110, 2: 4 * 90}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bytes_sent_by_this_rank(rank: int, case: str) -> None:
    call, name, wanted = CASES[case]
    ledger = TrafficLedger(axes={}, phase=lambda: "forward")
    with OperatorWatch(ledger):
        call(rank)
    row = {"axis": "world", "collective": name, "phase": "forward", "bytes": wanted[rank], "count": 1}
    assert ledger.rows() == [row]
