"""Ranks wait for the one that is still at work, whatever the timeout; silence of all that are missing is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from weft.core.errors import RankError
from weft.train.ranks import preparation
from weft.train.ranks.environment import Process
from weft.train.ranks.preparation import prepare_together
from weft.train.ranks.store import serve_store


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Callable[[], TCPStore]:
    """A client of one store each time; all ranks in this process are in the same round."""
    monkeypatch.setattr(preparation, "_rounds", iter(lambda: 0, 1))
    monkeypatch.setattr(preparation, "BEAT_S", 0.1)
    server = serve_store("127.0.0.1", timeout_s=60)
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))


def place(rank: int, world_size: int = 3) -> Process:
    return Process(rank=rank, local_rank=rank, world_size=world_size, restart_count=0)


def test_all_go_on_when_the_slowest_is_done_long_after_the_timeout(connect: Callable[[], TCPStore]) -> None:
    order: list[str] = []
    may_end = threading.Event()

    def run(rank: int) -> None:
        work = (lambda: may_end.wait(60)) if rank == 1 else (lambda: None)
        prepare_together(work, connect(), process=place(rank), timeout_s=0.5)
        order.append(f"rank {rank}")

    with ThreadPoolExecutor(3) as executor:
        futures = [executor.submit(run, rank) for rank in range(3)]
        time.sleep(2.0)  # four timeouts
        assert not any(future.done() for future in futures)
        order.append("end")
        may_end.set()
        for future in futures:
            future.result(timeout=60)
    assert order[0] == "end"
    assert len(order) == 4


def test_a_rank_that_never_comes_is_named(connect: Callable[[], TCPStore]) -> None:
    def run(rank: int) -> None:
        prepare_together(lambda: None, connect(), process=place(rank), timeout_s=0.5)

    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(run, rank) for rank in (0, 2)]
        for future in futures:
            with pytest.raises(RankError, match="rank 1 of 1 missing ranks did not prepare its data"):
                future.result(timeout=60)


def test_one_rank_alone_just_works() -> None:
    done: list[int] = []
    prepare_together(lambda: done.append(1), None, process=place(0, 1), timeout_s=1)  # type: ignore[arg-type]
    assert done == [1]
