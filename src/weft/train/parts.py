"""`TrainParts`: what a caller in Python gives beside run.toml: model, objective, optimizer, data, callbacks.

Ranks are processes of their own. Functions and classes of a notebook or a script reach them by value through
cloudpickle; those of importable modules by name.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weft.core.errors import BadValueError, BatchError
from weft.core.extras import import_extra
from weft.core.records import StepRecord
from weft.data.order import permute
from weft.engine.objective import IGNORED, Objective
from weft.engine.optim.optimizers import OptimizerFactory, OptimizerPolicy

Row = Mapping[str, Any]  # "input_ids", "labels", …: tensors, arrays or lists of equal length
StepCallback = Callable[[StepRecord], Any]


@dataclass(frozen=True, kw_only=True)
class TrainParts:
    """None takes what run.toml says. `model` is called on every rank; `callbacks` too, after every step: True stops."""

    model: Callable[[], nn.Module] | None = None
    objective: Objective | None = None
    optimizer: OptimizerPolicy | OptimizerFactory | str | None = None
    data: Sequence[Row] | None = None
    callbacks: tuple[StepCallback, ...] = ()

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, field.name) in (None, ()) for field in fields(self))

    def write(self, path: Path) -> None:
        """For the ranks, with the folders that this process imports from."""
        try:
            blob = import_extra("cloudpickle").dumps(self)
            path.write_bytes(pickle.dumps((list(sys.path), blob)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise BadValueError(
                f"the arguments of weft.train cannot be sent to the ranks: {error}",
                hint="give functions that build their objects, not live models, tensors on a GPU, files or locks",
            ) from None

    @staticmethod
    def read(path: Path) -> TrainParts:
        """The parts beside a job's file; none without a file."""
        if not path.exists():
            return TrainParts()
        folders, blob = pickle.loads(path.read_bytes())
        sys.path += [folder for folder in folders if folder not in sys.path]
        given: TrainParts = pickle.loads(blob)
        return given


class OwnRows:
    """A loader over a caller's rows: shuffled by the seed, each epoch anew; any number of ranks, any start."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: int,
        global_batch: int,
        dp_rank: int,
        dp_degree: int,
        epochs: int | None,
    ) -> None:
        if not len(rows):
            raise BadValueError("data has no rows", hint="give a sequence of mappings with input_ids and labels")
        if global_batch % dp_degree:
            raise BatchError(
                f"a global batch of {global_batch} does not divide over {dp_degree} data-parallel ranks",
                hint=f"set train.global_batch to a multiple of {dp_degree}",
            )
        self._data, self._seed, self._share = rows, seed, global_batch // dp_degree
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self.num_rows = len(rows)
        self._total = None if epochs is None else epochs * self.num_rows

    def has_batch(self, position: int) -> bool:
        return position >= 0 and (self._total is None or position < self._total)

    def epochs(self, position: int) -> dict[str, float]:
        return {"data": position / self.num_rows}

    def state(self, _position: int) -> dict[str, Any] | None:
        """What a resume needs besides the position: nothing."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue at a state."""

    def samples(self, position: int) -> NDArray[np.int64]:
        """The samples of the global batch that begins at `position`, in the order of its rows."""
        return position + np.arange(self._share * self._dp_degree, dtype=np.int64)

    def whole_batch(self, position: int) -> dict[str, torch.Tensor]:
        """The rows of all ranks, for inspection."""
        alone = copy.copy(self)
        alone._dp_rank, alone._dp_degree, alone._share = 0, 1, self._share * self._dp_degree
        return alone.batch(position)

    def batch(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's rows of the global batch that begins at sample `position`."""
        samples = self.samples(position)[self._dp_rank * self._share : (self._dp_rank + 1) * self._share]
        filler = samples >= self._total if self._total is not None else np.zeros(samples.shape, dtype=bool)
        epochs, indices = np.divmod(np.where(filler, 0, samples), self.num_rows)
        chosen = permute(indices, size=self.num_rows, seed=self._seed, epoch=epochs)
        rows = [self._data[int(index)] for index in chosen]
        batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        if "labels" in batch:
            batch["labels"][torch.from_numpy(filler)] = IGNORED
        return batch
