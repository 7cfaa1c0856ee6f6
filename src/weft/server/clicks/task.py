"""The click task: samples of a log, a click model, log loss; evaluated on the held-out samples by log loss and AUC.

AUC is exact, by ranks; equal scores share the mean of their ranks, so a constant score gives 0.5:

    auc = (sum of ranks of the positives - p (p + 1) / 2) / (p n)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.core.errors import DataError
from weft.core.server_spec import GENERATED, ServerRun
from weft.server.clicks.generated import GeneratedClicks
from weft.server.clicks.models import TABLE, ClickModel
from weft.server.clicks.samples import ClickBatch, ClickLog
from weft.server.clicks.store import StoredClicks, store_files

STORE = "samples"  # in the run folder
MAX_EVAL_SAMPLES = 200_000  # the first ones of more held-out samples; the figure "samples" is their number
_EVAL_BATCH = 4096


def area_under_curve(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float | None:
    """None if all labels are equal."""
    positive = labels > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        return None
    above = float(_mean_ranks(scores)[positive].sum()) - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)


def log_loss_sum(labels: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Sum over samples of log(1 + e**x) - y x, without overflow."""
    scores = logits.astype(np.float64)
    return float((np.logaddexp(0.0, scores) - labels * scores).sum())


def _mean_ranks(scores: NDArray[np.float32]) -> NDArray[np.float64]:
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    result: NDArray[np.float64] = (last_rank - (counts - 1) / 2.0)[group]
    return result


class ClickTask:
    def __init__(self, run: ServerRun, log: ClickLog, *, build_model: Callable[[], nn.Module] | None = None) -> None:
        self._log, self.read = log, log.read
        self.build_model: Callable[[], nn.Module] = build_model or (lambda: ClickModel(run))
        # The tables of a user's model are unknown here: each of its lookups reads.
        self._table = None if build_model else TABLE
        self._num_held = count_held_out(log.num_samples, eval_fraction=run.data.eval_fraction)

    @property
    def num_train(self) -> int:
        return self._log.num_samples - self._num_held

    def wanted(self, batch: ClickBatch) -> Mapping[str, NDArray[np.int64]]:
        return {self._table: batch.keys.reshape(-1)} if self._table else {}

    def loss_sum(self, model: nn.Module, batch: ClickBatch) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            _logits(model, batch), torch.from_numpy(batch.labels), reduction="sum"
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        stop = self.num_train + min(self._num_held, MAX_EVAL_SAMPLES)
        labels, logits = [], []
        for start in range(self.num_train, stop, _EVAL_BATCH):
            batch = self._log.read(np.arange(start, min(stop, start + _EVAL_BATCH)))
            with torch.no_grad():
                logits.append(_logits(model, batch).numpy())
            labels.append(batch.labels)
        truth, found = np.concatenate(labels), np.concatenate(logits)
        figures = {"loss": log_loss_sum(truth, found) / len(truth), "samples": float(len(truth))}
        auc = area_under_curve(truth, found)
        return figures if auc is None else {**figures, "auc": auc}


def count_held_out(num_samples: int, *, eval_fraction: float) -> int:
    """At least one sample to train on and one to evaluate: the last ones of the log."""
    if num_samples < 2:
        raise DataError(f"the click log has {num_samples} samples", hint="it needs two at least: one is held out")
    return min(num_samples - 1, max(1, round(num_samples * eval_fraction)))


def open_log(run: ServerRun, out: Path) -> ClickLog:
    """The log that `data.source` names."""
    spec = run.data
    if spec.source == GENERATED:
        return GeneratedClicks(
            num_samples=spec.samples,
            categorical=spec.categorical,
            numeric=spec.numeric,
            vocabulary=spec.vocabulary,
            zipf=spec.zipf,
            seed=run.train.seed,
        )
    return StoredClicks(out / STORE)


def prepare_data(run: ServerRun, out: Path) -> None:
    """The driver reads files once, into the run folder."""
    spec = run.data
    if spec.source != GENERATED:
        sources = [spec.source] if isinstance(spec.source, str) else spec.source
        store_files([Path(path) for path in sources], out / STORE, numeric=spec.numeric, categorical=spec.categorical)


def _logits(model: nn.Module, batch: ClickBatch) -> Tensor:
    logits: Tensor = model(torch.from_numpy(batch.keys), torch.from_numpy(batch.numeric))
    return logits.reshape(-1)
