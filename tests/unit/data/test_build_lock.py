"""One owner at a time; a dead owner is noticed at once on its machine, and by its silence elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.data import build_lock
from weft.data.build_lock import BuildLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def dead_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_one_at_a_time(path: Path) -> None:
    first, second = BuildLock(path), BuildLock(path)
    assert first.acquire()
    assert not second.acquire()
    assert not second.acquire()
    first.release()
    assert not path.exists()
    assert second.acquire()
    second.release()


def test_a_dead_owner_of_this_machine_is_taken_over_at_once(path: Path) -> None:
    first, second = BuildLock(path), BuildLock(path)
    assert first.acquire()
    rewrite(path, pid=dead_process())
    assert [second.acquire(), second.acquire()] == [False, True]
    first.release()  # too late: it is no longer its own
    assert path.exists()
    second.release()
    assert list(path.parent.iterdir()) == []


def test_a_number_that_another_process_has_now_is_a_dead_owner(path: Path) -> None:
    first, second = BuildLock(path), BuildLock(path)
    assert first.acquire()
    rewrite(path, started=1)
    assert [second.acquire(), second.acquire()] == [False, True]
    second.release()
    first.release()


def test_an_owner_elsewhere_is_dead_when_it_stays_silent(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = BuildLock(path), BuildLock(path)
    assert first.acquire()
    rewrite(path, host="elsewhere", machine="another kernel", pid=1)
    assert second.owner() == "pid 1 on elsewhere"
    now_s = [0.0]
    monkeypatch.setattr(build_lock.time, "monotonic", lambda: now_s[0])
    for _ in range(5):  # a living one touches its file
        now_s[0] += build_lock.STALE_S - 1
        rewrite(path, since=str(now_s[0]))
        assert not second.acquire()
    now_s[0] += build_lock.STALE_S + 1
    assert [second.acquire(), second.acquire()] == [False, True]
    second.release()
    first.release()


def test_a_lock_that_is_not_yet_written_is_alive(path: Path) -> None:
    path.write_text("")
    lock = BuildLock(path)
    assert not lock.acquire()
    assert lock.owner() == "another process"
    assert path.exists()
