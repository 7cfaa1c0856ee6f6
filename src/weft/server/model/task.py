"""`Task`: a model with `ShardedEmbedding`s, samples by number, a loss. Click models are one task.

The driver and every worker build the task from the run alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from weft.core.errors import ModelError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE
from weft.server.arrays import Keys
from weft.server.client import Client
from weft.server.model.dense import DenseBlocks
from weft.server.model.embedding import RowSession


@runtime_checkable
class Task(Protocol):
    @property
    def num_train(self) -> int:
        """Samples to train on; the number of a unit gives its samples."""
        ...

    def build_model(self) -> nn.Module: ...

    def read(self, indices: Keys) -> Any:
        """A batch of these samples, of any type."""
        ...

    def wanted(self, batch: Any) -> Mapping[str, Keys]:
        """Keys of the lookups of the forward, by table, for one round trip. May be empty: then each lookup reads."""
        ...

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The SUM of the losses of the samples; the servers divide."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Metrics on held-out samples, with "loss" and "auc" if there are such; may be empty."""
        ...


Build = Callable[[ServerRun], Any]  # a Task, or an nn.Module that takes (keys, numeric) to logits


def open_task(run: ServerRun, out: Path, *, build: Build | None = None) -> Task:
    """The task of the run: a click model, a model of the user on click data, or a task of the user."""
    from weft.server.clicks.task import ClickTask, open_log

    build = build or (None if run.model.factory is None else find_factory(run.model.factory))
    made = None if build is None else build(run)
    if made is None:
        return ClickTask(run, open_log(run, out))
    if isinstance(made, nn.Module):
        return ClickTask(run, open_log(run, out), build_model=lambda: build(run) if build else made)
    if isinstance(made, Task):
        return made
    raise ModelError(
        f"the factory gave a {type(made).__name__}", hint="it must give an nn.Module over (keys, numeric), or a Task"
    )


def find_factory(name: str) -> Build:
    """'module:function' as the function."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # child processes have it, the `weft` script has not
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"{name!r} cannot be imported: {error}", hint="give 'module:function' that Python finds from here"
        ) from None
    if not callable(found):
        raise ModelError(f"{name!r} is not a function", hint="give 'module:function'; it is called with the run")
    return found  # type: ignore[no-any-return]


class Evaluator:
    """Pulls the rows of the servers, changes nothing, evaluates on held-out samples."""

    def __init__(self, task: Task, model: nn.Module, client: Client) -> None:
        self._task, self._model, self._client = task, model, client
        self._blocks = DenseBlocks(model)

    def assign_first(self) -> None:
        """Writes the initial dense values of the model, if the servers have none."""
        if len(self._blocks.keys):
            self._client.assign(DENSE_TABLE, self._blocks.keys, self._blocks.rows(), only_absent=True)

    def evaluate(self) -> dict[str, float]:
        if len(self._blocks.keys):
            self._blocks.load(self._client.pull({DENSE_TABLE: self._blocks.keys}).rows[DENSE_TABLE])
        self._model.eval()
        with RowSession(lambda wanted: self._client.pull(wanted).rows):
            return {name: float(value) for name, value in self._task.evaluate(self._model).items()}
