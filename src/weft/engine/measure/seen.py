"""Dtypes that the engine's own code tells of tensors at hand: what no operator or hook shows.

    seen("dispatch", rows)      at the place where `rows` are sent

Only a watched step listens: not every other one, and not one with compiled blocks, which would be compiled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Listener = Callable[[str, torch.dtype | str], None]
_listeners: list[Listener] = []


def seen(component: str, dtype: torch.dtype | str) -> None:
    for listener in _listeners:
        listener(component, dtype)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    if listener is None:
        yield
        return
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
