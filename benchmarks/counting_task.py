"""A click task that also counts: a second table whose rows end as the exact number of their keys' occurrences.

    loss of the counts = -scale * sum(rows - rows.detach())     worth 0, its gradient is -scale for every occurrence
    row -= 1.0 * (-scale * occurrences) / weight                sgd with learning rate 1; scale = what servers divide by

With a power of two for the batch and for the workers all of it is exact in float32 below 2**24, whatever the order. So
`compare` tells apart a lost update (a count too low) and a doubled one (too high), which no loss curve can.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.core.server_spec import ServerRun
from weft.core.table_spec import RowInit, RowOptimizer
from weft.server.clicks.models import TABLE, ClickModel
from weft.server.clicks.samples import ClickBatch
from weft.server.clicks.task import ClickTask, open_log
from weft.server.model.embedding import ShardedEmbedding
from weft.server.node.reshard import server_folders
from weft.server.node.snapshots import restore
from weft.server.node.state import NodeSpec
from weft.server.worker.worker import order_of

COUNTS = "counts"


class CountingModel(nn.Module):
    def __init__(self, run: ServerRun) -> None:
        super().__init__()
        self.clicks = ClickModel(run)
        exact = RowOptimizer(kind="sgd", learning_rate=1.0)
        self.counts = ShardedEmbedding(COUNTS, 2, optimizer=exact, init=RowInit(kind="zeros"))

    def forward(self, keys: Tensor, numeric: Tensor) -> Tensor:
        logits: Tensor = self.clicks(keys, numeric)
        return logits


class CountingTask(ClickTask):
    def __init__(self, run: ServerRun) -> None:
        super().__init__(run, open_log(run, Path()), build_model=lambda: CountingModel(run))
        self._step_weight = run.train.global_batch if run.server.is_aggregated else None
        self._parts = run.server.workers if run.server.mode == "async" else 1

    def wanted(self, batch: ClickBatch) -> dict[str, NDArray[np.int64]]:
        return dict.fromkeys((TABLE, COUNTS), batch.keys.reshape(-1))

    def loss_sum(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        rows = model.counts(torch.from_numpy(batch.keys))
        scale = self._step_weight or len(batch) * self._parts
        return super().loss_sum(model, batch) - scale * (rows - rows.detach()).sum()


def build(run: ServerRun) -> CountingTask:
    return CountingTask(run)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Key occurrences of the whole run, and how many of them the servers' table has too few and too many of."""

    occurrences: int
    lost: int
    doubled: int


def compare(run: ServerRun, out: Path, *, steps: int) -> Counted:
    """The counts that the run's folder holds against those of the samples of `steps` steps."""
    task = CountingTask(run)
    order = order_of(run, task)
    indices = np.concatenate([order.indices(unit) for unit in range(steps * run.server.workers)])
    keys, expected = np.unique(task.read(indices).keys, return_counts=True)
    found = dict(zip(*_counts(out), strict=True))
    missing = expected - np.array([found.pop(key, 0.0) for key in keys.tolist()])
    surplus = float(sum(found.values()))  # of keys that no sample has
    return Counted(
        occurrences=int(expected.sum()),
        lost=int(missing[missing > 0].sum()),
        doubled=int(surplus - missing[missing < 0].sum()),
    )


def _counts(out: Path) -> tuple[list[int], list[float]]:
    records = all_records(out)[COUNTS]
    if (records["values"][:, 0] != records["values"][:, 1]).any():
        raise RuntimeError("the columns of a row differ: it was torn")
    return records["key"].tolist(), records["values"][:, 0].tolist()


def all_records(out: Path) -> dict[str, NDArray[np.void]]:
    """Every table's keys, values and optimizer state, ordered by key; when a row was changed is no part of it."""
    found: dict[str, list[NDArray[np.void]]] = {}
    for folder in server_folders(out / "servers"):
        for table in restore(folder, NodeSpec())[0].tables:
            records = table.records(0, table.num_slots)[["key", "values", "state"]]
            found.setdefault(table.spec.name, []).append(records)
    return {name: np.sort(np.concatenate(parts), order="key") for name, parts in found.items()}
