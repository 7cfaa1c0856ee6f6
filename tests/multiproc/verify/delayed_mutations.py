"""Bugs of delayed updates of offloaded states: each trains, with another update, another rate or another delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from mutations import replaced

import weft.engine.updates
from weft.engine.offload import delayed
from weft.engine.offload.delayed import DelayedOnDevice, DelayedOnHost
from weft.engine.offload.offloaded import OffloadedStates
from weft.engine.ownership import local


@contextmanager
def _both(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`name` of the update on the device and of that on the host, replaced by make(original)."""
    with replaced(DelayedOnDevice, name, make), replaced(DelayedOnHost, name, make):
        yield


def _weights(self: Any) -> list[torch.Tensor]:
    """The weights of the update in flight."""
    if isinstance(self, DelayedOnDevice):
        return [local(parameter.detach()) for parameter in self._pending]
    pieces = [piece for update in self._updates for piece in update.pieces]
    return [local(parameter.detach()) for parameter in dict.fromkeys(piece.parameter for piece in pieces)]


def update_lands_twice() -> Any:
    def make(original: Any) -> Any:
        def land(self: Any) -> None:
            weights = _weights(self)
            before = [weight.clone() for weight in weights]
            original(self)
            for weight, old in zip(weights, before, strict=True):
                weight.add_(weight - old)

        return land

    return _both("land", make)


def second_update_dropped() -> Any:
    def make(original: Any) -> Any:
        landed = [0]

        def land(self: Any) -> None:
            weights = _weights(self)
            before = [weight.clone() for weight in weights]
            original(self)
            landed[0] += bool(weights)
            if weights and landed[0] % 4 == 2:
                for weight, old in zip(weights, before, strict=True):
                    weight.copy_(old)

        return land

    return _both("land", make)


def update_lands_at_once() -> Any:
    def make(original: Any) -> Any:
        def run(self: Any, *given: Any) -> None:
            original(self, *given)
            self.land()

        return run

    return _both("run", make)


@contextmanager
def update_starts_from_the_weights_before() -> Iterator[None]:
    """The update of the step before is lost: the next one began before it had landed."""
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by object: weights, and their values before

    def make_land(original: Any) -> Any:
        def land(self: Any) -> None:
            kept[id(self)] = [(weight, weight.clone()) for weight in _weights(self)]
            original(self)

        return land

    def make_run(original: Any) -> Any:
        def run(self: Any, *given: Any) -> None:
            landed = [(weight, weight.clone()) for weight, _ in kept[id(self)]]
            for weight, old in kept.pop(id(self)):
                weight.copy_(old)
            original(self, *given)
            if isinstance(self, DelayedOnHost) and self._future is not None:
                self._future.result()
            for weight, new in landed:
                weight.copy_(new)

        return run

    with _both("land", make_land), _both("run", make_run):
        yield


def checkpoint_without_the_update_in_flight() -> Any:
    return replaced(OffloadedStates, "wait", lambda _: lambda self: self._streams.wait())


def rate_of_the_step_before_on_the_host() -> Any:
    kept: dict[float, float] = {}

    def make(original: Any) -> Any:
        def frozen(group: dict[str, Any]) -> dict[str, Any]:
            rate, kept[group["weight_decay"]] = kept.get(group["weight_decay"], group["lr"]), group["lr"]
            return {**original(group), "lr": rate}

        return frozen

    return replaced(delayed, "_frozen", make)


@contextmanager
def rate_of_the_step_after_on_the_host() -> Iterator[None]:
    """The thread begins after the next step has set its rate, which it reads."""

    class Late:
        def __init__(self, work: Callable[..., None], *given: Any) -> None:
            self.result = lambda: work(*given)

    def make(original: Any) -> Any:
        def run(self: DelayedOnHost, *given: Any) -> None:
            with patch.object(self._worker, "submit", Late):
                original(self, *given)

        return run

    with replaced(DelayedOnHost, "run", make), replaced(delayed, "_frozen", lambda _: lambda group: group):
        yield


def norm_of_the_step_before() -> Any:
    def make(original: Any) -> Any:
        factors: list[torch.Tensor] = []

        def factor(norm: torch.Tensor, bound: float) -> torch.Tensor:
            factors.append(original(norm, bound))
            return factors[max(0, len(factors) - 2)]

        return factor

    return replaced(weft.engine.updates, "clip_factor", make)
