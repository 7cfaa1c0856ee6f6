"""Every whole record comes back, in order; a torn tail, old content and gaps are told apart."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import CheckpointError, LogError
from weft.server.durable import log as log_module
from weft.server.durable.checksum import checksum
from weft.server.durable.log import Log, replay, segments

SMALL = 4096  # bytes of a segment


def fill(folder: Path, sizes: list[int], *, first: int = 1, sync: bool = False) -> None:
    log = Log(folder, first=first, sync=sync, segment_bytes=SMALL)
    for place, size in enumerate(sizes):
        number = log.append(2, f"head {first + place}".encode(), np.full(size, (first + place) % 251, np.uint8))
        log.wait_synced(number)
        assert number == first + place
    log.close()


def found(folder: Path, *, after: int = 0) -> list[int]:
    records = list(replay(folder, after=after))
    for record in records:
        assert record.head == f"head {record.number}".encode()
        assert np.all(record.body == record.number % 251)
    return [record.number for record in records]


@pytest.mark.parametrize("sync", [False, True])
def test_records_come_back_over_segments_and_restarts(tmp_path: Path, sync: bool) -> None:
    fill(tmp_path, [100, 0, 3000, 2000, 9000, 8], sync=sync)
    assert len(segments(tmp_path)) > 1
    fill(tmp_path, [5, 6], first=7, sync=sync)
    assert found(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found(tmp_path, after=5) == [6, 7, 8]


@settings(max_examples=30)
@given(cut=st.integers(0, 700))
def test_a_tail_that_was_cut_short_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("log")
    fill(folder, [100, 100, 100])
    path = segments(folder)[-1][1]
    record = 40 + len("head 1") + 100
    os.truncate(path, cut)
    assert found(folder) == list(range(1, min(3, cut // record) + 1))


def test_one_flipped_bit_ends_the_replay(tmp_path: Path) -> None:
    fill(tmp_path, [100, 100, 100])
    path = segments(tmp_path)[0][1]
    content = bytearray(path.read_bytes())
    content[146 + 80] ^= 1
    path.write_bytes(content)
    assert found(tmp_path) == [1]


def test_a_missing_middle_is_an_error_and_not_a_short_log(tmp_path: Path) -> None:
    fill(tmp_path, [3000, 3000, 3000])
    (_, middle) = segments(tmp_path)[1]
    middle.unlink()
    with pytest.raises(CheckpointError, match="lacks the records 2 to 2"):
        found(tmp_path)


def test_old_content_of_a_segment_in_use_again_is_not_replayed(tmp_path: Path) -> None:
    log = Log(tmp_path, first=1, sync=False, segment_bytes=SMALL)
    for number in range(1, 7):
        log.append(2, f"head {number}".encode(), np.full(1900, number, np.uint8))  # two fill a segment
    log.retire(before=7)
    assert list(tmp_path.glob("spare-*")), "a segment is kept for use again"
    for number in range(7, 10):
        log.append(2, f"head {number}".encode(), np.full(1900, number, np.uint8))
    log.close()
    assert found(tmp_path, after=6) == [7, 8, 9]


def test_a_segment_behind_a_broken_record_does_not_follow_new_ones(tmp_path: Path) -> None:
    fill(tmp_path, [3000, 3000, 3000])
    path = segments(tmp_path)[1][1]
    os.truncate(path, 10)  # record 2 is lost; the file of record 3 is still there
    with pytest.raises(CheckpointError):
        found(tmp_path)
    fill(tmp_path, [3000, 3000], first=2)  # a server that was told to go on from record 1
    assert found(tmp_path) == [1, 2, 3]


def test_a_full_disk_is_an_error_and_the_next_write_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path, first=1, sync=False, segment_bytes=SMALL)
    log.append(2, b"head 1", np.full(10, 1, np.uint8))
    real, calls = os.pwritev, []

    def full(file: int, parts: list[memoryview], at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [memoryview(parts[0])[:20]], at)  # a write that was cut short, then none

    monkeypatch.setattr(log_module.os, "pwritev", full)
    with pytest.raises(LogError, match="No space left"):
        log.append(2, b"head 2", np.full(10, 2, np.uint8))
    monkeypatch.setattr(log_module.os, "pwritev", real)
    assert log.append(2, b"head 2", np.full(10, 2, np.uint8)) == 2
    log.close()
    assert found(tmp_path) == [1, 2]


@settings(max_examples=50)
@given(content=st.binary(min_size=1, max_size=100), place=st.integers(0, 99), bit=st.integers(0, 7))
def test_a_checksum_sees_every_bit(content: bytes, place: int, bit: int) -> None:
    other = bytearray(content)
    other[place % len(content)] ^= 1 << bit
    assert checksum([content]) != checksum([bytes(other)])
    assert checksum([content]) != checksum([content], seed=1)


def test_a_spare_does_not_take_the_last_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, is_kept in ((1, False), (1 << 20, True)):
        told = SimpleNamespace(f_bavail=free, f_frsize=1 << 20)
        monkeypatch.setattr(log_module.os, "statvfs", lambda folder, told=told: told)
        fill(tmp_path, [3000, 3000, 3000])
        log_module.retire(tmp_path, before=3)
        assert bool(list(tmp_path.glob("spare-*"))) == is_kept


def test_what_a_killed_process_left_unsynced_is_synced_before_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, [100, 3000, 2000])  # written, never synced
    left, synced = [path for _, path in segments(tmp_path)], []
    monkeypatch.setattr(log_module, "sync_path", synced.append)
    Log(tmp_path, first=4, sync=False).close()
    assert synced == []
    log = Log(tmp_path, first=4, sync=True)
    assert synced == [*left, tmp_path], "the old records, then the new file's name"
    log.close()


def test_a_log_that_was_rolled_while_it_synced_loses_no_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(tmp_path, first=1, sync=True, segment_bytes=SMALL)
    is_syncing, may_sync, plain = threading.Event(), threading.Event(), os.fdatasync

    def slow(file: int) -> None:
        is_syncing.set()
        assert may_sync.wait(10)
        plain(file)

    monkeypatch.setattr(log_module.os, "fdatasync", slow)
    log.append(2, b"head 1", np.zeros(3000, np.uint8))
    failures: list[LogError] = []

    def wait() -> None:
        try:
            log.wait_synced(1)
        except LogError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert is_syncing.wait(10)
    monkeypatch.setattr(log, "_is_synced", False)  # the roll's own sync would only wait for the same file
    rolling = threading.Thread(target=log.append, args=(2, b"head 2", np.zeros(3000, np.uint8)))
    rolling.start()
    rolling.join(0.2)
    may_sync.set()
    waiting.join(10)
    rolling.join(10)
    log.close()
    assert not failures
