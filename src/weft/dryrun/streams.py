"""Numbered streams, since all CPU streams are the same: the CUDA allocator has separate pools per stream.

`fully_shard` gathers and reduces on its own streams; the computation cannot reuse memory freed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class NumberedStream(torch.cpu.Stream):
    """A stream with a number and no function."""

    _numbers = itertools.count(1)

    def __init__(self, priority: int = -1) -> None:
        super().__init__(priority)
        self.number = next(self._numbers)

    def wait_event(self, event: Any) -> None: ...


class CurrentStream:
    """The stream that work is issued to; 0 is the default stream."""

    def __init__(self) -> None:
        self._default = NumberedStream()
        self._default.number = 0
        self._stack = [self._default]

    @property
    def number(self) -> int:
        return self._stack[-1].number

    @contextmanager
    def select(self, stream: NumberedStream | None) -> Iterator[None]:
        self._stack.append(stream or self._stack[-1])
        try:
            yield
        finally:
            self._stack.pop()

    def _current(self, device: Any = None) -> NumberedStream:
        return self._stack[-1]

    def patches(self) -> list[Any]:
        """Patches of `torch.cpu` that route its streams here."""
        return [
            mock.patch.object(torch.cpu, "Stream", NumberedStream),
            mock.patch.object(torch.cpu, "stream", self.select),
            mock.patch.object(torch.cpu, "current_stream", self._current),
        ]
