"""`LoadWindow`: how many bytes the link loads between the first load of a step and its update, as measured.

    bytes of the next step = bytes loaded * (begin of the update - first load) / (end of the loads - first load)

The host may be steps ahead of the device, so a step uses the newest one that the device has finished.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from weft.engine.offload.copy_streams import NoStreams


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    nbytes: int
    first: torch.cuda.Event
    last: torch.cuda.Event
    update: torch.cuda.Event

    def is_done(self) -> bool:
        return all(event.query() for event in (self.last, self.update))  # type: ignore[no-untyped-call]

    def fitting_bytes(self) -> int:
        loading_ms, window_ms = self.first.elapsed_time(self.last), self.first.elapsed_time(self.update)
        return int(self.nbytes * window_ms / max(loading_ms, 1e-3))


class LoadWindow:
    """See the module. Without events (a CPU) there is no limit."""

    def __init__(self, streams: NoStreams, *, first_bytes: int) -> None:
        """`first_bytes`: the limit until one step was measured."""
        self._streams = streams
        self._limit_bytes = first_bytes
        self._first: torch.cuda.Event | None = None
        self._last: torch.cuda.Event | None = None
        self._pending: deque[_Loaded] = deque()
        self._is_measured = True

    def limit(self, room_bytes: int, *, loaded_bytes: int) -> int:
        """Bytes that may be loaded besides `loaded_bytes`, at most `room_bytes`."""
        return min(room_bytes, self._limit_bytes - loaded_bytes) if self._is_measured else room_bytes

    def begin_load(self) -> None:
        if self._first is None and self._is_measured:
            self._first = self._streams.stamp(of_loads=True)
            self._is_measured = self._first is not None

    def end_load(self) -> None:
        """At once after the load: the stream of loads may wait for the computation before the next one."""
        if self._is_measured:
            self._last = self._streams.stamp(of_loads=True)

    def end(self, loaded_bytes: int) -> None:
        """The update begins, with this many bytes loaded or on their way."""
        first, last, self._first, self._last = self._first, self._last, None, None
        if loaded_bytes and first is not None and last is not None:
            update = self._streams.stamp(of_loads=False)
            if update is not None:
                self._pending.append(_Loaded(nbytes=loaded_bytes, first=first, last=last, update=update))
        while self._pending and self._pending[0].is_done():
            self._limit_bytes = self._pending.popleft().fitting_bytes()
