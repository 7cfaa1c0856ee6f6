"""The trained tensors of a checkpoint, one at a time: as they were saved, or with adapters added to their base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from weft.checkpoint import LoadedCheckpoint, peek_newest
from weft.checkpoint.layout import read_best
from weft.core.errors import CheckpointError
from weft.core.optimizers import is_averaged
from weft.core.run_spec import RunSpec
from weft.engine.export import model_tensors
from weft.models.adapter.merge import merged_tensors
from weft.models.build import build_config
from weft.train.build import base_weights, digest_of_base
from weft.train.folder.changes import require_same_base
from weft.train.folder.run_folder import RunFolder, require_run

Order = Callable[[list[str]], list[str]]


def has_adapter(run_dir: Path) -> bool:
    """Whether the run trained an adapter."""
    require_run(run_dir)
    return RunSpec.from_file(run_dir / "run.toml").adapter.is_on


def checkpoint_of(run_dir: Path, *, step: int | None) -> LoadedCheckpoint:
    """The newest good (or the named) checkpoint of a run."""
    require_run(run_dir)
    checkpoint = peek_newest(RunFolder(run_dir).checkpoints_path, step=step)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no checkpoint", hint="train with checkpoint.at_end = true, the default")
    return checkpoint


def best_step_of(run_dir: Path) -> int:
    """The step of the best checkpoint of a run."""
    require_run(run_dir)
    best = read_best(RunFolder(run_dir).checkpoints_path)
    if best is None:
        raise CheckpointError(
            f"{run_dir} has no best checkpoint", hint="train with checkpoint.keep_best = 'held-out' or a name of a set"
        )
    return int(best["step"])


def saved_tensors(
    checkpoint: Path, *, order: Order = list, ema: bool = False, run: RunSpec | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a checkpoint; with `ema` the averages of those that were trained.

    With `run` those at which its optimizer evaluates."""
    first = run.train.betas[0] if run is not None and is_averaged(run.train.optimizer) else 0.0
    return model_tensors(checkpoint, ema=ema, order=order, averaged_by=first)


def full_tensors(
    run: RunSpec, checkpoint: LoadedCheckpoint, *, order: Order = list, ema: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of the run's model; of a run with adapters the merged ones."""
    if ema and not run.train.ema_decay:
        raise CheckpointError(
            "the run has no average of its weights", hint="train with train.ema_decay above 0, such as 0.999"
        )
    if not run.adapter.is_on:
        yield from saved_tensors(checkpoint.path, order=order, ema=ema, run=run)
        return
    require_same_base(checkpoint.meta, digest_of_base(run), run)
    config = build_config(run.model, vocab_size=1)
    base, _ = base_weights(run, config, device=torch.device("cpu"))
    yield from merged_tensors(run, config, base, dict(saved_tensors(checkpoint.path, ema=ema, run=run)), order=order)
