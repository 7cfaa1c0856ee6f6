"""Which buffers of a model its forward changes: running statistics, counters, averages, biases of routers.

Found by looking, not by names: after the first forwards every buffer is held against a copy of its value on the host,
since code that writes through `.data` leaves no trace; later a changed version counter or another tensor in the same
place is the sign. A model whose buffers are constants (rotary tables, masks) costs nothing after its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def slots_of(model: nn.Module) -> list[Slot]:
    """In the order of modules: the same on every rank, also where a stage has given some up."""
    return [
        Slot(f"{prefix}.{key}" if prefix else key, module, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
    ]


class BufferChanges:
    """Of one model, as far as this rank has seen. `mark` when values are there; `look` after forwards."""

    def __init__(self, model: nn.Module) -> None:
        self.slots = slots_of(model)
        self.changing: set[int] = set()  # places in `slots`
        self._marks: list[tuple[Tensor | None, int]] = []
        self._copies: list[Tensor | None] = []

    @torch.no_grad()
    def mark(self) -> None:
        """What is there now is what a change is seen against."""
        values = [slot.value for slot in self.slots]
        self._marks = [(value, _version(value)) for value in values]
        self._copies = [None if value is None else value.detach().to("cpu", copy=True) for value in values]

    def look(self, *, by_value: bool) -> None:
        """Add what has changed since the mark. `by_value`: whatever the signs; waits for the device."""
        for place, slot in enumerate(self.slots):
            if place not in self.changing and (by_value or self._has_sign(place)):
                copy, value = self._copies[place], slot.value
                if (copy is None) != (value is None) or (value is not None and has_other_values(value, copy)):
                    self.changing.add(place)

    def renew(self) -> None:
        """Changing buffers in memory of their own: a forward that writes in place leaves alone what autograd keeps for
        the backwards of micro-batches before it."""
        for place in self.changing:
            self.slots[place].put(_clone(self.slots[place].value))

    def has_signs(self) -> bool:
        """Whether a buffer that was taken for a constant may have changed."""
        return any(self._has_sign(place) for place in range(len(self.slots)) if place not in self.changing)

    def is_reshaped(self, place: int) -> bool:
        """A cache: it has another shape or format than at the mark, or was not there."""
        value, copy = self.slots[place].value, self._copies[place]
        if value is None or copy is None:
            return (value is None) != (copy is None)
        return value.shape != copy.shape or value.dtype != copy.dtype

    def first_value(self, place: int) -> Tensor | None:
        """At the mark."""
        return self._copies[place]

    def inside(self, module: nn.Module) -> list[int]:
        members = set(module.modules())
        return [place for place, slot in enumerate(self.slots) if slot.module in members]

    def _has_sign(self, place: int) -> bool:
        tensor, version = self._marks[place]
        value = self.slots[place].value
        return value is not tensor or _version(value) != version


class Before:
    """What some buffers held before a forward, for repeating it: where only changing ones are worth a copy."""

    def __init__(self, changes: BufferChanges, places: Sequence[int]) -> None:
        self._changes, self._places = changes, places
        # one that nobody has seen changing yet still has the value of the mark
        chosen = [place for place in places if place in changes.changing]
        self._values = {place: _clone(changes.slots[place].value) for place in chosen}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, buffers hold what they held; afterwards what they hold now, which a repetition must not change.

        By exchanging tensors: what autograd has kept of the live ones stays as it is."""
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

    def _value(self, place: int, live: Tensor | None) -> Tensor | None:
        if place in self._values:
            return _clone(self._values[place])
        first = self._changes.first_value(place)
        return first if first is None or live is None else first.to(live.device, copy=True)


def has_other_values(value: Tensor, copy: Tensor | None) -> bool:
    """Waits for the device. NaN equals NaN. A dry run, which has no numbers, says no."""
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
