"""Detects the buffers that a model's forward changes: running statistics, counters, averages, router biases.

Detection is by value, not by name: after the first forwards every buffer is compared with a copy on the host, since
code that writes through `.data` leaves no trace; later a changed version counter or another tensor in the same place
triggers a comparison. Constant buffers (rotary tables, masks) cost nothing after the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Slot:
    """A buffer's place in a model; the tensor there may be another after a forward."""

    name: str
    module: nn.Module
    key: str

    @property
    def value(self) -> Tensor | None:
        """None: another pipeline stage has it."""
        return self.module._buffers[self.key]

    @property
    def is_persistent(self) -> bool:
        return self.key not in self.module._non_persistent_buffers_set

    def put(self, value: Tensor | None) -> None:
        self.module._buffers[self.key] = value


def slots_of(model: nn.Module, *, without: Collection[str] = ()) -> list[Slot]:
    """In the order of modules: the same on every rank, also if a stage has dropped some."""
    found = [
        Slot(f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
    ]
    return [slot for slot in found if slot.name not in without]


class BufferChanges:
    """The changes of one model's buffers, as seen on this rank. `mark` once values exist; `look` after forwards."""

    def __init__(self, model: nn.Module, *, without: Collection[str] = ()) -> None:
        """`without`: buffers that the engine changes itself, alike on all ranks."""
        self.slots = slots_of(model, without=without)
        self.changing: set[int] = set()  # places in `slots`
        self._marks: list[tuple[Tensor | None, int]] = []
        self._copies: list[Tensor | None] = []

    @torch.no_grad()
    def mark(self) -> None:
        """Changes are detected against the current values from now on."""
        values = [slot.value for slot in self.slots]
        self._marks = [(value, _version(value)) for value in values]
        self._copies = [None if value is None else value.detach().to("cpu", copy=True) for value in values]

    def look(self, *, by_value: bool) -> None:
        """Add buffers that have changed since the mark. `by_value`: compare all; waits for the device."""
        for place, slot in enumerate(self.slots):
            if place not in self.changing and (by_value or self._may_have_changed(place)):
                copy, value = self._copies[place], slot.value
                if (copy is None) != (value is None) or (value is not None and has_other_values(value, copy)):
                    self.changing.add(place)

    def renew(self) -> None:
        """Move changing buffers to new memory: a forward that writes in place must not overwrite the tensors that
        autograd has saved for the backwards of earlier micro-batches."""
        for place in self.changing:
            self.slots[place].put(_clone(self.slots[place].value))

    def may_have_more(self) -> bool:
        """Whether a buffer recorded as constant may have changed."""
        return any(self._may_have_changed(place) for place in range(len(self.slots)) if place not in self.changing)

    def is_reshaped(self, place: int) -> bool:
        """A cache: its shape or dtype differs from that at the mark, or it did not exist."""
        value, copy = self.slots[place].value, self._copies[place]
        if value is None or copy is None:
            return (value is None) != (copy is None)
        return value.shape != copy.shape or value.dtype != copy.dtype

    def first_value(self, place: int) -> Tensor | None:
        """At the mark."""
        return self._copies[place]

    def places_in(self, module: nn.Module) -> list[int]:
        members = set(module.modules())
        return [place for place, slot in enumerate(self.slots) if slot.module in members]

    def _may_have_changed(self, place: int) -> bool:
        tensor, version = self._marks[place]
        value = self.slots[place].value
        return value is not tensor or _version(value) != version


class BufferSnapshot:
    """The values of some buffers before a forward, for recomputing it. Copies only those that change."""

    def __init__(self, changes: BufferChanges, places: Sequence[int]) -> None:
        self._changes, self._places = changes, places
        # a buffer not yet seen changing still has the value of the mark
        chosen = [place for place in places if place in changes.changing]
        self._values = {place: _clone(changes.slots[place].value) for place in chosen}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, buffers have the snapshot's values; afterwards their current ones, which recompute must not change.

        Tensors are exchanged, not overwritten: autograd may have saved the live ones."""
        chosen = [place for place in self._places if place in self._changes.changing]
        slots = self._changes.slots
        live = {place: slots[place].value for place in chosen}
        try:
            for place in chosen:
                slots[place].put(self._value(place, live[place]))
            yield
        finally:
            for place in chosen:
                slots[place].put(live[place])

    def restore(self) -> None:
        """Put the snapshot's values back, for good."""
        slots = self._changes.slots
        for place in self._places:
            if place in self._changes.changing:
                slots[place].put(self._value(place, slots[place].value))

    def _value(self, place: int, live: Tensor | None) -> Tensor | None:
        if place in self._values:
            return _clone(self._values[place])
        first = self._changes.first_value(place)
        return first if first is None or live is None else first.to(live.device, copy=True)


def has_other_values(value: Tensor, copy: Tensor | None) -> bool:
    """Waits for the device. NaN equals NaN. A dry run has no numbers and returns False."""
    if copy is None or value.shape != copy.shape or value.dtype != copy.dtype:
        return True
    here = value.detach().to("cpu")
    if here.is_floating_point() and here.dtype.itemsize > 1:
        return not torch.allclose(here, copy, rtol=0.0, atol=0.0, equal_nan=True)
    return not torch.equal(here, copy)


def _clone(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _version(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else int(value._version)
