"""The reference of a run on parameter servers: one process, plain torch. It shares no update, server or socket with it.

A row's first values are read from a separate `Table`, so a wrong first value would be wrong on both sides
(tests/unit/server/table/test_initial.py checks those). Rows are stored in ordinary matrices, optimizers are textbook
formulas, a step takes the full global batch at once.
`Reference.follow` makes updates in a given order of pulls and pushes, as an asynchronous run does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE, RowOptimizer, TableSpec
from weft.server.model.dense import DenseBlocks, dense_spec
from weft.server.model.embedding import RowSession, table_specs
from weft.server.model.task import Task
from weft.server.table.table import Table
from weft.server.units import SampleOrder
from weft.server.worker.worker import build_seeded, order_of

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Gradients = Mapping[str, tuple[Keys, Rows]]


@dataclass(frozen=True)
class ServerEvent:
    """Worker `worker` pulls the rows of its unit, or pushes its gradients."""

    worker: int
    unit: int
    is_push: bool


class ReferenceTable:
    """A growing matrix of rows and of optimizer state; the spec gives the first values."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._first = Table(spec)  # first values are checked by the table's own tests
        self._places: dict[int, int] = {}
        self._rows = torch.empty(0, spec.dim)
        self._state: dict[str, Tensor] = {}

    def read(self, keys: Keys) -> Rows:
        places = self._places_of(keys)  # first: it may grow the matrix
        return self._rows[places].numpy()

    def assign(self, keys: Keys, rows: Rows) -> None:
        places = self._places_of(keys)
        self._rows[places] = torch.from_numpy(rows)

    def update(self, keys: Keys, gradients: Tensor, *, lr_scale: float) -> None:
        places, optimizer = self._places_of(keys), self.spec.optimizer
        state = {name: values[places] for name, values in self._state.items()}
        rate = optimizer.learning_rate * lr_scale
        if optimizer.kind == "ftrl":  # its rate is part of the row's state: only the gradient can be scaled
            gradients = gradients * lr_scale
        self._rows[places] = _updated(optimizer, self._rows[places], gradients, state, rate=rate)
        for name, values in state.items():
            self._state[name][places] = values

    def everything(self) -> tuple[Keys, Rows]:
        keys = np.array(sorted(self._places), np.int64)
        return keys, self.read(keys)

    def _places_of(self, keys: Keys) -> Tensor:
        fresh = [key for key in dict.fromkeys(keys.tolist()) if key not in self._places]
        if fresh:
            first = np.empty((len(fresh), self.spec.dim), np.float32)
            self._first.pull(np.array(fresh, np.int64), first)
            self._places.update({key: len(self._places) + at for at, key in enumerate(fresh)})
            self._rows = torch.cat([self._rows, torch.from_numpy(first)])
            for name, start in _first_state(self.spec.optimizer).items():
                added = torch.full((len(fresh), self.spec.dim), start)
                self._state[name] = torch.cat([self._state[name], added]) if name in self._state else added
        return torch.tensor([self._places[key] for key in keys.tolist()])


def _first_state(optimizer: RowOptimizer) -> dict[str, float]:
    if optimizer.kind == "adam":
        return {"m": 0.0, "v": 0.0, "t": 0.0}
    if optimizer.kind == "ftrl":
        return {"z": 0.0, "n": optimizer.initial_accumulator}
    return {} if optimizer.kind == "sgd" else {"n": optimizer.initial_accumulator}


def _updated(optimizer: RowOptimizer, w: Tensor, g: Tensor, state: dict[str, Tensor], *, rate: float) -> Tensor:
    """The new rows; `state` is changed in place."""
    if optimizer.kind == "sgd":
        return w - rate * g
    if optimizer.kind == "adam":
        one, two = optimizer.betas
        state["t"] += 1
        state["m"] = one * state["m"] + (1 - one) * g
        state["v"] = two * state["v"] + (1 - two) * g * g
        steps = state["t"].double()  # 1 - 0.999 ** t has three digits less in float32
        mean = state["m"] / (1 - one**steps).float()
        square = state["v"] / (1 - two**steps).float()
        return w - rate * mean / (square.sqrt() + optimizer.epsilon)
    if optimizer.kind == "ftrl":
        return _ftrl(optimizer, w, g, state)
    square = g * g
    state["n"] = state["n"] + (square.mean(1, keepdim=True) if optimizer.kind == "rowwise_adagrad" else square)
    return w - rate * g / (state["n"].sqrt() + optimizer.epsilon)


def _ftrl(optimizer: RowOptimizer, w: Tensor, g: Tensor, state: dict[str, Tensor]) -> Tensor:
    """FTRL; z starts at the value that yields the row's first value, which an update would discard otherwise."""

    def pull(n: Tensor) -> Tensor:
        return (optimizer.beta + n.sqrt()) / optimizer.learning_rate + optimizer.l2

    before = state["n"]
    is_first = (before == optimizer.initial_accumulator) & (state["z"] == 0)
    z = torch.where(is_first, -w.sign() * (w.abs() * pull(before) + optimizer.l1), state["z"])
    state["n"] = before + g * g
    state["z"] = z + g - (state["n"].sqrt() - before.sqrt()) / optimizer.learning_rate * w
    shrunk = state["z"].sign() * (state["z"].abs() - optimizer.l1).clamp(min=0)
    return -shrunk / pull(state["n"])


def _summed(gradients: Sequence[Gradients]) -> Gradients:
    total: dict[str, dict[int, Rows]] = {}
    for tables in gradients:
        for name, (keys, rows) in tables.items():
            own = total.setdefault(name, {})
            for key, row in zip(keys.tolist(), rows, strict=True):
                own[key] = own[key] + row if key in own else row
    return {name: (np.array(list(own), np.int64), np.stack(list(own.values()))) for name, own in total.items()}


@dataclass
class Reference:
    run: ServerRun
    task: Task
    model: nn.Module = field(init=False)
    tables: dict[str, ReferenceTable] = field(init=False)

    def __post_init__(self) -> None:
        self.model = build_seeded(self.task, seed=self.run.train.seed)
        self._blocks = DenseBlocks(self.model)
        specs = [*table_specs(self.model), dense_spec(self.run.dense.optimizer)]
        self.tables = {spec.name: ReferenceTable(spec) for spec in specs}
        self.tables[DENSE_TABLE].assign(self._blocks.keys, self._blocks.rows())

    def train(self, steps: int, *, pieces: int = 1) -> list[float]:
        """Train on global batches; return the mean losses. `pieces` > 1: the same sums in another order."""
        order, losses = order_of(self.run, self.task), []
        for step in range(steps):
            units = range(step * order.shares, (step + 1) * order.shares)
            indices = np.concatenate([order.indices(unit) for unit in units])
            found = [self._gradients(piece) for piece in np.array_split(indices, pieces) if len(piece)]
            self._apply(_summed([gradients for _, gradients in found]), weight=len(indices), lr_scale=1.0)
            losses.append(sum(loss_sum for loss_sum, _ in found) / len(indices))
        return losses

    def follow(self, events: Sequence[ServerEvent], order: SampleOrder, *, discount: float) -> None:
        """Pull and push in the order of `events`; a push is applied at once, discounted by its staleness."""
        read: dict[int, tuple[int, Gradients, int]] = {}
        num_applied = 0
        for event in events:
            if not event.is_push:
                indices = order.indices(event.unit)
                _, gradients = self._gradients(indices)
                read[event.unit] = (num_applied, gradients, len(indices))
                continue
            version, gradients, weight = read.pop(event.unit)
            beyond = max(0, num_applied - version - (order.shares - 1)) / order.shares
            # A push is one share of a step: `order.shares` pushes have the weight of one synchronous update.
            self._apply(gradients, weight=weight, shares=order.shares, lr_scale=(1 + beyond) ** -discount)
            num_applied += 1

    def _gradients(self, indices: Keys) -> tuple[float, Gradients]:
        batch = self.task.read(indices)
        self._blocks.load(self.tables[DENSE_TABLE].read(self._blocks.keys))
        self._blocks.clear_gradients()
        session = RowSession(self._read)
        with session:
            loss = self.task.loss_sum(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients: dict[str, Any] = {
            name: (np.array(keys), np.array(rows)) for name, (keys, rows) in session.take_gradients().items()
        }
        gradients[DENSE_TABLE] = (self._blocks.keys, self._blocks.gradients())
        return loss.item(), gradients

    def _apply(self, gradients: Gradients, *, weight: float, lr_scale: float, shares: int = 1) -> None:
        for name, (keys, rows) in gradients.items():
            table = self.tables[name]
            rate = lr_scale / shares**0.5 if table.spec.optimizer.kind == "adam" else lr_scale
            table.update(keys, torch.from_numpy(rows) / (weight * shares), lr_scale=rate)

    def _read(self, wanted: Mapping[str, Keys]) -> Mapping[str, Rows]:
        return {name: np.array(self.tables[name].read(keys)) for name, keys in wanted.items()}
