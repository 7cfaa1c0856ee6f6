"""The driver's own view of what the servers hold: reads rows, changes nothing, evaluates on held-out samples."""

from __future__ import annotations

from torch import nn

from weft.core.table_spec import DENSE_TABLE
from weft.server.client import Client
from weft.server.dense import DenseBlocks
from weft.server.session import RowSession
from weft.server.task import Task


class Evaluator:
    def __init__(self, task: Task, model: nn.Module, client: Client) -> None:
        self._task, self._model, self._client = task, model, client
        self._blocks = DenseBlocks(model)

    def assign_first(self) -> None:
        """The model's first dense values, where the servers have none."""
        if len(self._blocks.keys):
            self._client.assign(DENSE_TABLE, self._blocks.keys, self._blocks.rows(), only_absent=True)

    def evaluate(self) -> dict[str, float]:
        if len(self._blocks.keys):
            self._blocks.load(self._client.pull({DENSE_TABLE: self._blocks.keys}).rows[DENSE_TABLE])
        self._model.eval()
        session = RowSession(lambda wanted: self._client.pull(wanted).rows)
        with session:
            return {name: float(value) for name, value in self._task.evaluate(self._model).items()}
