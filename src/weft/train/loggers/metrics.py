"""Writer of step records: metrics.jsonl always, TensorBoard by default, trackers if asked, experts.jsonl for mixtures,
samples.jsonl for sampled texts.

Rank 0 only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from weft.core.records import ExpertLoads, StepRecord, TextSample, perplexity_of
from weft.train.folder.run_folder import RunFolder
from weft.train.loggers.tensorboard import TensorBoard
from weft.train.loggers.trackers import Trackers


class MetricsWriter:
    """Keeps all records of the run, those before a resume included."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        is_writing: bool,
        tensorboard: bool,
        earlier: list[StepRecord],
        trackers: Trackers | None = None,
    ) -> None:
        self.changed: tuple[str, ...] = ()  # keys changed by a resume, written with the next record
        self.records = list(earlier)
        self._file = folder.metrics if is_writing else None
        self._experts = folder.experts if is_writing else None
        self._samples = folder.samples if is_writing else None
        self._tensorboard = TensorBoard(folder.tensorboard_path) if tensorboard and is_writing else None
        self._trackers = trackers

    def write(self, record: StepRecord) -> None:
        if self.changed:
            record, self.changed = dataclasses.replace(record, changed=self.changed), ()
        self.records.append(record)
        if self._file is not None:
            self._file.append(record)
        if self._tensorboard is not None:
            self._tensorboard.write(record.step, _scalars(record))
        if self._trackers is not None:
            self._trackers.write(record.step, _scalars(record))

    def write_experts(self, loads: ExpertLoads) -> None:
        if self._experts is not None:
            self._experts.append(loads)

    def write_samples(self, samples: Sequence[TextSample]) -> None:
        if self._samples is not None:
            for sample in samples:
                self._samples.append(sample)
        if self._tensorboard is not None and samples:
            texts = {f"samples/{index}": f"{one.prompt}{one.text}" for index, one in enumerate(samples)}
            self._tensorboard.write_texts(samples[0].step, texts)

    def rewind(self, step: int) -> None:
        """Drop everything after `step`: these steps are made again."""
        self.records = [record for record in self.records if record.step <= step]
        if self._file is not None and self._file.path.exists():
            self._file.drop_after(step)
        for beside in (self._experts, self._samples):
            if beside is not None and beside.path.exists():
                beside.drop_after(step)
        if self._tensorboard is not None:
            self._tensorboard.close()  # the next value opens a file that hides later steps of this one

    def close(self, *, is_finished: bool = False) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        trackers, self._trackers = self._trackers, None
        if trackers is not None:
            trackers.close(is_finished=is_finished)


def _scalars(record: StepRecord) -> dict[str, float | None]:
    return {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.learning_rate,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
        "memory/peak_bytes": float(record.peak_memory_bytes),
        "memory/reserved_bytes": record.reserved_memory_bytes,
        "train/loss_scale": record.loss_scale,
        "evaluation/loss": record.eval_loss,
        "evaluation/perplexity": None
        if record.eval_loss is None or record.figures
        else perplexity_of(record.eval_loss),
        **{f"train/{name}": value for name, value in (record.figures or {}).items()},
        "experts/load": record.expert_load,
        "experts/load_max": record.expert_load_max,
        "experts/entropy": record.expert_entropy,
        "experts/dead": record.dead_experts,
        "experts/dropped_share": record.dropped_share,
        "router/balance_loss": record.router_balance_loss,
        "router/z_loss": record.router_z_loss,
        "float8/error": record.float8_error,
        "float8/overflow": record.float8_overflow,
        "float8/underflow": record.float8_underflow,
        **{
            f"evaluation/{name}/{key}": value
            for name, found in (record.evaluations or {}).items()
            for key, value in (("loss", found.loss), ("perplexity", found.perplexity))
        },
    }
