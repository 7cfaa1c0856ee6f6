"""The message that this rank waits for, to come or to be taken: Gloo's messages are in no flight recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """`what`, for people ("activations of micro-batch 3 for stage 1"), from or to the global rank `peer`."""

    what: str
    peer: int


class _Wait:
    current: Awaited | None = None


@contextmanager
def waiting_for(what: str, peer: int) -> Iterator[None]:
    """Around a blocking receive, or the wait for the end of a send."""
    _Wait.current = Awaited(what=what, peer=peer)
    yield
    _Wait.current = None  # not after an exception: the report of it says what was awaited


def awaited() -> Awaited | None:
    """What this rank waits for now; read by other threads."""
    return _Wait.current
