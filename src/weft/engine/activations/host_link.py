"""Copies between a device and slots of its host: one stream each way, made once; without streams on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.engine.activations.host_slots import HostSlot


class HostLink:
    """`send` and `bring` return at once on a GPU; `slot.done` is the event of the copy, `wait` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        has_streams = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if has_streams else None  # type: ignore[no-untyped-call]
        self._back = torch.cuda.Stream(device) if has_streams else None  # type: ignore[no-untyped-call]

    def send(self, source: Tensor, slot: HostSlot) -> None:
        self._copy(self._out, slot.viewed(source.numel(), source.dtype), source, slot)

    def bring(self, slot: HostSlot, target: Tensor) -> None:
        self._copy(self._back, target, slot.viewed(target.numel(), target.dtype), slot)

    def wait(self, event: Any) -> None:
        """The current stream waits for a copy; the host does not."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, stream: Any, target: Tensor, source: Tensor, slot: HostSlot) -> None:
        if stream is None:
            target.copy_(source)
            return
        # a source must have been computed, and the earlier owner of a target's memory must have read it
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if slot.done is not None:
            stream.wait_event(slot.done)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=not slot.is_ordinary)
            slot.done = stream.record_event()
