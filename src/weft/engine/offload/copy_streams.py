"""Two streams of copies beside the computation, to the device and from it, and the events between them.

Copies belong to a slot, which has one piece of memory at a time. The streams are made once: each new stream would be a
new pool of the allocator. On a CPU copies are plain calls in program order, and nothing waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class NoStreams:
    """Of a CPU."""

    @property
    def stores(self) -> torch.cuda.Stream | None:
        """The stream of copies from the device."""
        return None

    def begin(self) -> None:
        """Copies that are issued next begin after the computation issued so far."""

    @contextmanager
    def to_device(self, slot: int) -> Iterator[None]:
        """Around copies to the device that use a slot, after its last copies from the device."""
        yield

    @contextmanager
    def from_device(self, slot: int) -> Iterator[None]:
        """Around copies from the device that use a slot, after its last copies to the device."""
        yield

    def computation_waits(self, slot: int, *, stored: bool = False) -> None:
        """The computation continues after the slot's copies to the device, or `stored`: from it."""

    def copies_wait(self) -> None:
        """Copies from the device that are issued next begin after the computation issued so far."""

    def host_waits(self, slot: int, *, loaded: bool = False) -> None:
        """Return after the slot's copies from the device, or `loaded`: to it."""

    def end(self) -> None:
        """The computation continues after all copies to the device."""

    def wait(self) -> None:
        """Return after all copies."""

    def stamp(self, *, of_loads: bool) -> torch.cuda.Event | None:
        """The time when the copies to the device, or the computation, come this far; None: not measured."""
        return None


class CopyStreams(NoStreams):
    """Of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._came: dict[int, torch.cuda.Event] = defaultdict(torch.cuda.Event)
        self._left: dict[int, torch.cuda.Event] = defaultdict(torch.cuda.Event)

    @property
    def stores(self) -> torch.cuda.Stream | None:
        return self._down

    def begin(self) -> None:
        current = torch.cuda.current_stream(self._device)
        self._up.wait_stream(current)
        self._down.wait_stream(current)

    @contextmanager
    def to_device(self, slot: int) -> Iterator[None]:
        self._up.wait_event(self._left[slot])
        with torch.cuda.stream(self._up):
            yield
        self._came[slot].record(self._up)

    @contextmanager
    def from_device(self, slot: int) -> Iterator[None]:
        self._down.wait_event(self._came[slot])
        with torch.cuda.stream(self._down):
            yield
        self._left[slot].record(self._down)

    def computation_waits(self, slot: int, *, stored: bool = False) -> None:
        event = (self._left if stored else self._came)[slot]
        torch.cuda.current_stream(self._device).wait_event(event)

    def copies_wait(self) -> None:
        self._down.wait_stream(torch.cuda.current_stream(self._device))

    def host_waits(self, slot: int, *, loaded: bool = False) -> None:
        (self._came if loaded else self._left)[slot].synchronize()

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)

    def wait(self) -> None:
        self._up.synchronize()
        self._down.synchronize()

    def stamp(self, *, of_loads: bool) -> torch.cuda.Event | None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._up if of_loads else torch.cuda.current_stream(self._device))
        return event


def streams_for(device: torch.device) -> NoStreams:
    return CopyStreams(device) if device.type == "cuda" else NoStreams()
