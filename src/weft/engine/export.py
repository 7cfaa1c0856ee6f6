"""`Engine.export`: the weights of a live engine as a Hugging Face folder, through a checkpoint that is removed again.

Every rank writes its shards; rank 0 then reads one full tensor at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weft.checkpoint import peek_newest, read_manifest, read_tensors
from weft.core.errors import CheckpointError
from weft.engine.optim.averages import EMA, averages_of
from weft.engine.optim.schedule_free import BASE, ScheduleFreeAdamW, evaluation_point
from weft.engine.state import MODEL, OPTIMIZER
from weft.models.hf_export import export_folder, skeleton_of

if TYPE_CHECKING:
    from weft.engine.engine_state import EngineState


def export_engine(engine: EngineState, out: Path, *, ema: bool) -> None:
    """Write the folder. Collective: every rank of the engine calls it with the same folder."""
    config: Any = getattr(engine.model, "config", None)
    if not hasattr(config, "to_dict"):
        raise CheckpointError(
            "the model has no Hugging Face config, which an export needs",
            hint="use engine.save(folder) for other modules",
        )
    if ema and not averages_of(engine.optimizer):
        raise CheckpointError("the engine has no average of its weights", hint="use OptimizerPolicy(ema_decay=0.999)")
    scratch = out.with_name(f".{out.name}-checkpoint")
    engine.save(scratch)
    try:
        if dist.get_rank() == 0:
            checkpoint = peek_newest(scratch)
            if checkpoint is None:
                raise CheckpointError(f"{scratch} has no checkpoint", hint="check space and permissions")
            is_free = isinstance(engine.optimizer, ScheduleFreeAdamW)
            first = engine.optimizer.defaults["betas"][0] if is_free else 0.0
            tensors = model_tensors(checkpoint.path, ema=ema, averaged_by=first)
            export_folder(config, tensors, out, skeleton=skeleton_of(config))
    finally:
        if dist.get_world_size() > 1:
            dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def model_tensors(
    checkpoint: Path, *, ema: bool = False, order: Any = list, averaged_by: float = 0.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a checkpoint by name; with `ema` the averages of those that were trained.

    `averaged_by`: the first beta of schedule-free AdamW, whose average takes the place of the weights."""
    stored = read_manifest(checkpoint).tensors
    names = order([key.removeprefix(MODEL) for key in stored if key.startswith(MODEL)])
    averages = {name: f"{OPTIMIZER}{name}.{EMA}" for name in names} if ema else {}
    name_of = {key if (key := averages.get(name, "")) in stored else f"{MODEL}{name}": name for name in names}
    for key, tensor in read_tensors(checkpoint, list(name_of)):
        base = f"{OPTIMIZER}{name_of[key]}.{BASE}"
        if averaged_by and not ema and base in stored:
            [(_, moved)] = read_tensors(checkpoint, [base])
            yield name_of[key], evaluation_point(tensor, moved, averaged_by)
        else:
            yield name_of[key], tensor
