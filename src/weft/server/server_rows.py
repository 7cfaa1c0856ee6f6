"""Rows straight from the servers, gradients straight back: what workers of sync and async runs train on.

pull(unit) waits by the gate; push(unit) is applied once, however often a unit is done
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from weft.server.client import Client
from weft.server.session import Keys, Rows

Gradients = Mapping[str, tuple[Keys, Rows]]


class RowSource(Protocol):
    """Where a worker's rows come from and its gradients go."""

    def open(self, unit: int) -> None:
        """The next reads are for this unit."""

    def read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]: ...

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        """Sums of gradients over `weight` samples; returns the staleness on each server."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether what was learnt here must be settled now."""
        ...

    def settle(self) -> bool:
        """Gives the servers everything that was learnt here; False: they refused it, and it is forgotten here too."""
        ...


class ServerRows:
    def __init__(self, client: Client, *, parts: int = 1) -> None:
        """`parts`: pushes that make a step where each is applied by itself (`rates.py`); 1 where servers sum them."""
        self._client, self._parts = client, parts
        self._unit = 0
        self._versions: tuple[int, ...] | None = None

    def open(self, unit: int) -> None:
        self._unit, self._versions = unit, None

    def read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]:
        pulled = self._client.pull(wanted, unit=self._unit)
        # The first pull of a unit is the oldest: staleness counts from there.
        self._versions = self._versions or pulled.versions
        return pulled.rows

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        weight *= self._parts
        pushed = self._client.push(gradients, unit=self._unit, weight=weight, versions=self._versions, unique=True)
        return pushed.staleness

    @property
    def is_due(self) -> bool:
        return True

    def settle(self) -> bool:
        return True
