"""A rank's watch: two threads that publish this rank's status and end the rank when the job has failed.

    beat     every second: write this rank's status to the store; a full answer if another rank asks
    guard    ends the rank, even if its main thread is stuck in C++, when another rank has published an error, or when
             neither the store has answered nor this rank has progressed for the collective timeout: a broken link is
             noticed on both of its sides

It adds no work to a step: a beat is two short messages. Every request to the store has a deadline, since a store behind
a broken link never answers. `stalls` draws the conclusions.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from weft.comm.flight import progress_mark
from weft.core.errors import StallError
from weft.train.ranks.environment import Process
from weft.train.ranks.failures import FailureRecord, is_timeout
from weft.train.ranks.progress import is_message_wait, progress
from weft.train.ranks.stalls import StallScene, explain, explain_lost_store
from weft.train.ranks.status import RankStatus, own_status

_BEAT_S = 1.0
_ANSWER_S = 6.0  # time for an asked rank to answer: several beats of a busy machine
_QUESTION_S = 5.0
# Time for the main thread to fail with its own error before the guard ends the rank.
_ABORT_GRACE_S = 5.0
_LOST_GRACE_S = 15.0
# Keys of the store. The alarm is set from the first failure on: one check per beat while there is none.
_ALARM, _ASK, _ERROR = "weft/alarm", "weft/ask", "weft/error"

End = Callable[[FailureRecord], None]
Result = TypeVar("Result")


class RankWatch:
    def __init__(self, store: Store, process: Process, *, address: str, timeout_s: float, end: End | None) -> None:
        """The guard's thread calls `end` with the error that this rank ends with; None: a launcher ends the rank."""
        self._store, self._process = store, process
        self._address, self._timeout_s, self._end = address, timeout_s, end
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_reporting = False
        self._answered_at = self._moved_at = time.monotonic()
        self._mark: Any = None
        self._rank_0: RankStatus | None = None
        self._published: tuple[FailureRecord, float] | None = None

    def start(self) -> None:
        self._store.set(_beat_key(self._process.rank), own_status(self._process.rank, in_full=False).to_json())
        for name, work in (("rank-beat", self._beats), ("rank-guard", self._guard)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Wait for the threads: one that returns from the store while Python finalises aborts the process."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_QUESTION_S)

    def final_record(self, record: FailureRecord, error: Exception) -> FailureRecord:
        """The record to report, published if it is the first; for a lost peer, asks the other ranks which one it is."""
        self._is_reporting = True
        progress.enter(record.phase)  # the exception has left it, but other ranks ask for it
        if record.secondary:
            first = self._first_error()
            if first is not None:
                return first if self._end is not None else record
            try:
                stall = self._explained(record, error)
            except Exception:  # a failed explanation must not lose the record itself
                stall = None
            if stall is not None:
                record = dataclasses.replace(record, error_fields=stall.as_dict())
        first = self._publish(record)
        return first if record.secondary and first is not None and self._end is not None else record

    # ------------------------------------------------------------------------------------------------ asking others

    def _explained(self, record: FailureRecord, error: Exception) -> StallError | None:
        own = dataclasses.replace(own_status(self._process.rank, in_full=True), phase=record.phase)
        asked = _within(_QUESTION_S + _ANSWER_S, self._ask)
        if asked is None:
            silent_s = time.monotonic() - self._answered_at
            return explain_lost_store(address=self._address, silent_s=silent_s, rank_0=self._rank_0, own=own)
        answered, last_seen = asked
        return explain(
            StallScene(
                rank=own.rank,
                world_size=self._process.world_size,
                answered={**answered, own.rank: own},
                last_seen=last_seen,
                timeout_s=self._timeout_s,
                is_timeout=is_timeout(error),
                is_message=is_message_wait(error),
            )
        )

    def _ask(self) -> tuple[dict[int, RankStatus], dict[int, RankStatus]]:
        """The answers of other ranks, and the last beats of ranks that do not answer."""
        store = _second_client(self._store)
        store.set(_ASK, "1")
        store.set(_ALARM, "1")
        deadline = time.monotonic() + _ANSWER_S
        others = [rank for rank in range(self._process.world_size) if rank != self._process.rank]
        answered: dict[int, RankStatus] = {}
        while len(answered) < len(others) and time.monotonic() < deadline:
            time.sleep(_BEAT_S / 4)
            missing = [rank for rank in others if rank not in answered]
            answered |= _read(store, _answer_key, missing)
        return answered, _read(store, _beat_key, [rank for rank in others if rank not in answered])

    def _first_error(self) -> FailureRecord | None:
        def look() -> FailureRecord | None:
            store = _second_client(self._store)
            return FailureRecord.from_json(store.get(_ERROR).decode()) if store.check([_ERROR]) else None

        return _within(_QUESTION_S, look)

    def _publish(self, record: FailureRecord) -> FailureRecord | None:
        def publish() -> FailureRecord:
            store = _second_client(self._store)
            first = store.compare_set(_ERROR, "", record.to_json())
            store.set(_ALARM, "1")
            return FailureRecord.from_json(first.decode())

        return _within(_QUESTION_S, publish)

    # ----------------------------------------------------------------------------------------------- the two threads

    def _beats(self) -> None:
        try:
            store = _second_client(self._store)
            while not self._stopped.wait(_BEAT_S):
                self._beat(store)
                self._answered_at = time.monotonic()
        except Exception:  # the store ended with rank 0 or its agent: the guard counts from here
            return

    def _beat(self, store: Store) -> None:
        rank = self._process.rank
        store.set(_beat_key(rank), own_status(rank, in_full=False).to_json())
        if self._rank_0 is None and rank != 0:
            self._rank_0 = _read(store, _beat_key, [0]).get(0)
        if not store.check([_ALARM]):
            return
        if store.check([_ASK]):
            store.set(_answer_key(rank), own_status(rank, in_full=True).to_json())
        if self._published is None and store.check([_ERROR]):
            self._published = (FailureRecord.from_json(store.get(_ERROR).decode()), time.monotonic())

    def _guard(self) -> None:
        while self._end is not None and not self._stopped.wait(_BEAT_S):
            if self._is_reporting:  # the main thread ends the rank, in bounded time
                continue
            over = self._over()
            if over is not None:
                self._end(over)

    def _over(self) -> FailureRecord | None:
        """The error to end with; None while the job continues."""
        now, mark = time.monotonic(), (progress.phase, progress.since, progress_mark())
        if mark != self._mark:
            self._mark, self._moved_at = mark, now
        if self._published is not None and now - self._published[1] > _ABORT_GRACE_S:
            return self._published[0]
        patience_s = self._timeout_s + _LOST_GRACE_S
        if now - self._answered_at > patience_s and now - self._moved_at > patience_s:
            return self._lost(now - self._answered_at)
        return None

    def _lost(self, silent_s: float) -> FailureRecord:
        own = own_status(self._process.rank, in_full=False)
        error = explain_lost_store(address=self._address, silent_s=silent_s, rank_0=self._rank_0, own=own)
        return FailureRecord(
            rank=own.rank,
            world_size=self._process.world_size,
            phase=own.phase,
            time=time.time(),
            secondary=True,
            traceback="",
            error_fields=error.as_dict(),
        )


def _second_client(store: Store) -> Store:
    """A separate connection: the main thread may block for minutes in a call on the first."""
    return store.clone()  # type: ignore[attr-defined,no-any-return]  # public, but not in torch's stub


def _beat_key(rank: int) -> str:
    return f"weft/beat/{rank}"


def _answer_key(rank: int) -> str:
    return f"weft/answer/{rank}"


def _read(store: Store, key_of: Callable[[int], str], ranks: list[int]) -> dict[int, RankStatus]:
    """Statuses of the ranks that have written one; a `get` of a missing key would wait for the store's timeout."""
    return {rank: RankStatus.from_json(store.get(key_of(rank))) for rank in ranks if store.check([key_of(rank)])}


def _within(seconds: float, question: Callable[[], Result]) -> Result | None:
    """The answer, or None if it fails or is late: its thread is abandoned, since the process ends soon."""
    answers: list[Result] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception:  # without the store the caller's own error is the best known
            return

    thread = threading.Thread(target=ask, name="rank-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
