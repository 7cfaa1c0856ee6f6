"""`Task`: what is trained - a model with `ShardedEmbedding`s, samples by number, a loss. Click models are one.

A task is built alike in the driver and in every worker, so it must follow from the run alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.core.errors import ModelError
from weft.core.server_spec import ServerRun
from weft.server.session import Keys


@runtime_checkable
class Task(Protocol):
    @property
    def num_train(self) -> int:
        """Samples to train on; those of a unit follow from its number."""
        ...

    def build_model(self) -> nn.Module: ...

    def read(self, indices: NDArray[np.int64]) -> Any:
        """A batch of these samples, of any type."""
        ...

    def wanted(self, batch: Any) -> Mapping[str, Keys]:
        """Keys that the forward will look up, by table: read in one round trip. May be empty: then by each lookup."""
        ...

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        """The SUM of the samples' losses; the servers divide."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures of held-out samples, "loss" and "auc" among them where there are such; may be empty."""
        ...


Build = Callable[[ServerRun], Any]  # a Task, or an nn.Module that takes (keys, numeric) to logits


def open_task(run: ServerRun, out: Path, *, build: Build | None = None) -> Task:
    """The run's task: a click model, one of the user's own on click data, or a task of the user's own."""
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
    if os.getcwd() not in sys.path:  # the children of a run have it, the `weft` script has not
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
