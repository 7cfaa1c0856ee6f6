from __future__ import annotations

import time
from typing import Any

import pytest

from weft.train.ranks import watch as rank_watch
from weft.train.ranks.environment import Process
from weft.train.ranks.watch import Patience, RankWatch


class SlowStore:
    """A store whose answers take a while; `requests` counts those under way."""

    def __init__(self) -> None:
        self.requests = 0

    def clone(self) -> SlowStore:
        return self

    def set(self, _key: str, _value: Any) -> None:
        self.requests += 1
        time.sleep(0.2)
        self.requests -= 1

    def check(self, _keys: list[str]) -> bool:
        return False


def test_no_request_is_under_way_after_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that returns from the store while Python finalises ended a finished rank by SIGABRT.
    monkeypatch.setattr(rank_watch, "_BEAT_S", 0.001)
    store = SlowStore()
    process = Process(rank=0, local_rank=0, world_size=2, restart_count=0)
    patience = Patience(timeout_s=60, hang_s=60)
    watch = RankWatch(store, process, address="here", patience=patience, end=lambda _record: None)  # type: ignore[arg-type]
    watch.start()
    while not store.requests:
        time.sleep(0.001)
    watch.stop()
    assert store.requests == 0
