"""A rank's watch: two threads that publish this rank's status, find hangs, and end the rank when the job has failed.

    beat     every second: write this rank's status to the store; a full answer if another rank asks
    guard    a wait without any progress for the hang timeout, or an abort: asks all ranks and ends this one with the
             sentence that names the cause. Without weft's launcher it also ends the rank, even if its main thread is
             stuck in C++, when another rank has published an error, or when neither the store has answered nor this
             rank has progressed for the collective timeout: a broken link is noticed on both of its sides

It adds no work to a step: a beat is two short messages. `questions` asks the other ranks, `stalls` draws the
conclusions, `last_stack` has the stack of a rank whose threads cannot run.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from weft.comm.flight import progress_mark
from weft.core.errors import RankError, StallError, WeftError
from weft.train.ranks import stall_words as words
from weft.train.ranks.environment import Process
from weft.train.ranks.failures import FailureRecord, is_timeout
from weft.train.ranks.last_stack import LastStack, read_stack
from weft.train.ranks.pace import PaceLooks, Paces, RankPace
from weft.train.ranks.progress import progress
from weft.train.ranks.questions import QUESTION_S, Questions, beat_key, pace_key, published_error, read
from weft.train.ranks.stalls import StallScene, explain, explain_lost_store, is_patient
from weft.train.ranks.status import RankStatus, is_waiting, own_status

_BEAT_S = 1.0
# Time for the main thread to fail with its own error before the guard ends the rank.
_ABORT_GRACE_S = 5.0
_LOST_GRACE_S = 15.0
_ASKING_S = 12.0  # part of the hang timeout: for the beat, answers, and the end of the job
_PACE_S = 3.0  # between two readings of all ranks' paces, on rank 0

End = Callable[[FailureRecord], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds: until a collective fails by itself, and until a wait inside a step is called a hang."""

    timeout_s: float
    hang_s: float


class RankWatch:
    def __init__(
        self,
        store: Store,
        process: Process,
        *,
        address: str,
        patience: Patience,
        end: End,
        is_launched: bool = False,
        folder: Path | None = None,
    ) -> None:
        """The guard's thread calls `end` with the error that this rank ends with. `is_launched`: weft's launcher ends
        the ranks after an error, and `folder` is its folder for their files."""
        self._process, self._address, self._patience = process, address, patience
        self._end, self._is_launched = end, is_launched
        self._questions = Questions(store, rank=process.rank, world_size=process.world_size)
        self._last_stack = LastStack(folder, rank=process.rank)
        self._looks, self.paces = PaceLooks(), Paces()  # the second on rank 0 only
        self._store = store
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._is_reporting = False
        self._answered_at = self._moved_at = self._asked_at = self._paced_at = time.monotonic()
        self._mark: Any = None
        self._rank_0: RankStatus | None = None
        self._published: tuple[FailureRecord, float] | None = None

    def start(self) -> None:
        self._last_stack.start()
        self._postpone_stack()
        self._looks.start()
        self._store.set(beat_key(self._process.rank), self._status().to_json())
        for name, work in (("rank-beat", self._beats), ("rank-guard", self._guard)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Wait for the threads: one that returns from the store while Python finalises aborts the process."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(QUESTION_S)
        self._looks.stop()
        self._last_stack.stop()

    def final_record(self, record: FailureRecord, error: Exception) -> FailureRecord:
        """The record to report, published if it is the first; for a lost peer, asks the other ranks which one it is."""
        self._is_reporting = True
        progress.enter(record.phase)  # the exception has left it, but other ranks ask for it
        if record.secondary:
            first = self._questions.first_error()
            if first is not None:
                return first if not self._is_launched else record
            try:
                stall = self._explained(self._patience.timeout_s, is_timeout=is_timeout(error), phase=record.phase)
            except Exception:  # a failed explanation must not lose the record itself
                stall = None
            if stall is not None:
                record = dataclasses.replace(record, error_fields=stall.as_dict())
        first = self._questions.publish(record)
        return first if record.secondary and first is not None and not self._is_launched else record

    def _status(self, *, in_full: bool = False) -> RankStatus:
        return own_status(self._process.rank, in_full=in_full, stack_file=str(self._last_stack.path))

    def _explained(
        self, timeout_s: float, *, is_timeout: bool, phase: str = "", is_hang: bool = False, is_abort: bool = False
    ) -> StallError | None:
        """The error that names the rank that did not arrive; None: no rank is late, or it is no hang."""
        own = self._status(in_full=True)
        own = dataclasses.replace(own, phase=phase or own.phase)
        found = self._questions.ask_all(own)
        if found is None:
            silent_s = time.monotonic() - self._answered_at
            return explain_lost_store(address=self._address, silent_s=silent_s, rank_0=self._rank_0, own=own)
        scene = StallScene(
            rank=own.rank,
            world_size=self._process.world_size,
            answered={**found.answered, own.rank: own},
            last_seen=found.last_seen,
            observed=found.observed,
            timeout_s=timeout_s,
            is_timeout=is_timeout,
            is_abort=is_abort,
        )
        return None if is_hang and is_patient(scene) else explain(scene)

    # ------------------------------------------------------------------------------------------------------ the beat

    def _beats(self) -> None:
        try:
            store = self._questions.client()
            while not self._stopped.wait(_BEAT_S):
                self._postpone_stack()
                self._beat(store)
                self._exchange_paces(store)
                self._answered_at = time.monotonic()
        except Exception:  # the store ended with rank 0 or its agent: the guard counts from here
            return

    def _postpone_stack(self) -> None:
        """Until before a hang is found, so that the stack is there by then."""
        self._last_stack.postpone(max(2 * _BEAT_S, self._patience.hang_s / 3))

    def _beat(self, store: Store) -> None:
        rank = self._process.rank
        store.set(beat_key(rank), self._status().to_json())
        if self._rank_0 is None and rank != 0:
            self._rank_0 = read(store, beat_key, [0]).get(0)
        self._questions.answer(store, lambda: self._status(in_full=True))
        if self._published is None and (first := published_error(store)) is not None:
            self._published = (first, time.monotonic())

    def _exchange_paces(self, store: Store) -> None:
        rank, now = self._process.rank, time.monotonic()
        own = RankPace(rank=rank, host=socket.gethostname(), looks=self._looks.looks, waits=self._looks.waits)
        store.set(pace_key(rank), own.to_json())
        if rank == 0 and now - self._paced_at > _PACE_S:
            self._paced_at = now
            keys = [key for key in map(pace_key, range(self._process.world_size)) if store.check([key])]
            self.paces.put([RankPace.from_json(text) for text in store.multi_get(keys)])

    # ----------------------------------------------------------------------------------------------------- the guard

    def _guard(self) -> None:
        while not self._stopped.wait(_BEAT_S / 2):
            if self._is_reporting:  # the main thread ends the rank, in bounded time
                continue
            self._look()
            over = self._over() or self._aborted() or self._hung()
            if over is not None and not self._is_reporting and not self._stopped.is_set():
                self._end(over)
                return

    def _look(self) -> None:
        mark = (progress.phase, progress.since, progress_mark())
        if mark != self._mark:
            self._mark, self._moved_at = mark, time.monotonic()

    def _over(self) -> FailureRecord | None:
        """Without weft's launcher: the error to end with, when the job has failed or is lost."""
        now = time.monotonic()
        if self._is_launched:
            return None
        if self._published is not None and now - self._published[1] > _ABORT_GRACE_S:
            return self._published[0]
        patience_s = self._patience.timeout_s + _LOST_GRACE_S
        if now - self._answered_at > patience_s and now - self._moved_at > patience_s:
            silent_s, own = now - self._answered_at, self._status()
            lost = explain_lost_store(address=self._address, silent_s=silent_s, rank_0=self._rank_0, own=own)
            return self._record(lost, secondary=True)
        return None

    def _hung(self) -> FailureRecord | None:
        """The error of a hang: this rank waits in a step and has not progressed. It comes within the hang timeout."""
        hang_s, moved_at = self._patience.hang_s, self._moved_at
        ask_after_s = max(hang_s / 2, hang_s - _ASKING_S)
        now = time.monotonic()
        if min(now - moved_at, now - self._asked_at) < ask_after_s or progress.is_slow or not is_waiting():
            return None
        self._asked_at = now
        stall = self._explained(round(now - moved_at), is_timeout=True, is_hang=True)
        self._look()
        if stall is None or self._moved_at != moved_at:  # it goes on after all
            return None
        return self._published_or_own(self._record(stall, secondary=True))

    def _aborted(self) -> FailureRecord | None:
        """The error of an abort in C++, which waits meanwhile: Gloo's for tensors of another size, NCCL's timeout."""
        if not self._last_stack.is_aborting():
            return None
        stall = self._explained(self._patience.timeout_s, is_timeout=True, is_abort=True)
        if stall is not None:
            return self._published_or_own(self._record(stall, secondary=True))
        at = words.at(read_stack(str(self._last_stack.path)))
        error = RankError(f"the process aborted (SIGABRT){at}", hint="the reason is in its own output, above")
        return self._record(error, secondary=False)

    def _published_or_own(self, record: FailureRecord) -> FailureRecord:
        first = self._questions.publish(record)
        return record if first is None or self._is_launched else first

    def _record(self, error: WeftError, *, secondary: bool) -> FailureRecord:
        return FailureRecord(
            rank=self._process.rank,
            world_size=self._process.world_size,
            phase=progress.phase,
            time=time.time(),
            secondary=secondary,
            traceback="",
            error_fields=error.as_dict(),
        )
