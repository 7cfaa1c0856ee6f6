"""Where step records go: metrics.jsonl always, TensorBoard by default. Rank 0 only."""

from __future__ import annotations

from typing import Any

from weft.core.records import StepRecord
from weft.train.run_folder import RunFolder


class MetricsWriter:
    """Keeps the records of the whole run, resumed part included."""

    def __init__(self, folder: RunFolder, *, is_writing: bool, tensorboard: bool, earlier: list[StepRecord]) -> None:
        self.records = list(earlier)
        self._folder = folder
        self._is_writing = is_writing
        self._tensorboard_wanted = tensorboard and is_writing
        self._tensorboard: Any = None

    def write(self, record: StepRecord) -> None:
        self.records.append(record)
        if not self._is_writing:
            return
        self._folder.append_metrics(record)
        if self._tensorboard_wanted:
            self._write_tensorboard(record)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_tensorboard(self, record: StepRecord) -> None:
        if self._tensorboard is None:  # after the first step: importing TensorBoard takes a second
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self._folder.tensorboard_path), purge_step=record.step if self.records[:-1] else None
            )
        for tag, value in _scalars(record).items():
            self._tensorboard.add_scalar(tag, value, record.step)


def _scalars(record: StepRecord) -> dict[str, float]:
    values = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.learning_rate,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
        "memory/peak_bytes": float(record.peak_memory_bytes),
        "train/loss_scale": record.loss_scale,
        "evaluation/loss": record.eval_loss,
    }
    return {tag: value for tag, value in values.items() if value is not None}
