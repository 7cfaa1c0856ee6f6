"""What ranks ask each other through the store: statuses, what a host sees of a silent rank, the first published error.

    alarm set  ->  asked: every rank writes its full status  ->  absent ranks: others on their hosts write what they see

Every request has a deadline, since a store behind a broken link never answers. `watch` decides when to ask.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.distributed_c10d import Store

from weft.train.ranks.failures import FailureRecord
from weft.train.ranks.stall_words import observe
from weft.train.ranks.status import Observation, RankStatus

QUESTION_S = 5.0
ANSWER_S = 6.0  # time for an asked rank to answer: several beats of a busy machine
_LOOK_S = 2.5  # the end of it, for what other ranks see of those that have not answered
_PAUSE_S = 0.25
# Keys of the store. The alarm is set from the first question or error on: one check per beat while there is none.
_ALARM, _ASK, _ABSENT, _ERROR = "weft/alarm", "weft/ask", "weft/absent", "weft/error"
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Statuses of other ranks; the last beats of those that do not answer, and what their hosts see of them."""

    answered: dict[int, RankStatus]
    last_seen: dict[int, RankStatus]
    observed: dict[int, Observation]


class Questions:
    """One rank's questions and answers, each on a connection of its own: the main thread may block on the first."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._answered = 0  # the number of the last question that this rank has answered
        self._looked_at: set[int] = set()

    def client(self) -> Store:
        return self._store.clone()  # type: ignore[attr-defined,no-any-return]  # public, but not in torch's stub

    def ask_all(self, own: RankStatus) -> Answers | None:
        """None if the store is lost."""
        return within(QUESTION_S + ANSWER_S, lambda: self._ask_all(own))

    def first_error(self) -> FailureRecord | None:
        """The error that some rank has published."""
        return within(QUESTION_S, lambda: published_error(self.client()))

    def publish(self, record: FailureRecord) -> FailureRecord | None:
        """Publish an error; returns the first one."""

        def publish() -> FailureRecord:
            store = self.client()
            first = store.compare_set(_ERROR, "", record.to_json())
            store.set(_ALARM, "1")
            return FailureRecord.from_json(first.decode())

        return within(QUESTION_S, publish)

    def answer(self, store: Store, status: Callable[[], RankStatus]) -> None:
        """Answer what other ranks have asked since; on every beat."""
        if not store.check([_ALARM]):
            return
        number = store.add(_ASK, 0)
        if number > self._answered:
            self._answered = number
            store.set(_answer_key(self._rank), f"{number} {status().to_json()}")
        if store.check([_ABSENT]):
            self._look(store, own=status())

    def _ask_all(self, own: RankStatus) -> Answers:
        store = self.client()
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        number = store.add(_ASK, 1)
        store.set(_ALARM, "1")
        deadline = time.monotonic() + ANSWER_S
        answered: dict[int, RankStatus] = {}
        silent = others
        is_looking = False
        while silent and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            answered |= _answers(store, silent, number=number)
            silent = [rank for rank in others if rank not in answered]
            if silent and not is_looking and time.monotonic() > deadline - _LOOK_S:
                is_looking = True
                absent = read(store, beat_key, silent).values()
                store.set(_ABSENT, json.dumps([status.to_json() for status in absent]))
            if silent and all(_is_stuck(status, own) for status in read(store, beat_key, silent).values()):
                break
        last_seen = read(store, beat_key, silent)
        observed = {rank: observe(status) for rank, status in last_seen.items() if status.host == own.host}
        for rank in (rank for rank in last_seen if rank not in observed and store.check([_seen_key(rank)])):
            observed[rank] = Observation.from_json(store.get(_seen_key(rank)))
        return Answers(answered=answered, last_seen=last_seen, observed=observed)

    def _look(self, store: Store, *, own: RankStatus) -> None:
        """Write what this rank sees of silent ranks on its host."""
        for text in json.loads(store.get(_ABSENT)):
            status = RankStatus.from_json(text)
            if status.host == own.host and status.rank not in (own.rank, *self._looked_at):
                self._looked_at.add(status.rank)
                store.set(_seen_key(status.rank), observe(status).to_json())


def _is_stuck(status: RankStatus, own: RankStatus) -> bool:
    """Whether a rank of the own host, and so of its clock, was silent for long before it was asked."""
    return status.host == own.host and own.time - status.time > ANSWER_S


def published_error(store: Store) -> FailureRecord | None:
    if store.check([_ALARM]) and store.check([_ERROR]):
        return FailureRecord.from_json(store.get(_ERROR).decode())
    return None


def beat_key(rank: int) -> str:
    return f"weft/beat/{rank}"


def pace_key(rank: int) -> str:
    return f"weft/pace/{rank}"


def read(store: Store, key_of: Callable[[int], str], ranks: list[int]) -> dict[int, RankStatus]:
    """Statuses of the ranks that have written one; a `get` of a missing key would wait for the store's timeout."""
    return {rank: RankStatus.from_json(store.get(key_of(rank))) for rank in ranks if store.check([key_of(rank)])}


def within(seconds: float, question: Callable[[], Result]) -> Result | None:
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


def _answers(store: Store, ranks: list[int], *, number: int) -> dict[int, RankStatus]:
    """Answers to this question, or to a later one."""
    texts = {rank: store.get(_answer_key(rank)).decode() for rank in ranks if store.check([_answer_key(rank)])}
    parts = {rank: text.partition(" ") for rank, text in texts.items()}
    return {rank: RankStatus.from_json(rest) for rank, (of, _, rest) in parts.items() if int(of) >= number}


def _answer_key(rank: int) -> str:
    return f"weft/answer/{rank}"


def _seen_key(rank: int) -> str:
    return f"weft/seen/{rank}"
