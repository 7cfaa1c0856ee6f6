"""Whether a backward repeats a forward right now, in this thread: code that counts must not count it again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any


class _RecomputingThread(threading.local):
    is_recomputing = False


_current = _RecomputingThread()


def is_recomputing() -> bool:
    return _current.is_recomputing


@contextmanager
def recomputing() -> Iterator[None]:
    """Around a recomputed forward."""
    before, _current.is_recomputing = _current.is_recomputing, True
    try:
        yield
    finally:
        _current.is_recomputing = before


@contextmanager
def entered(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Several contexts as one: checkpoint takes one for the recomputed forward."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
