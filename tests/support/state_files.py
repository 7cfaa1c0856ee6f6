"""Engines whose optimizer states are in files, in a folder of a real disk. For tests only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from narrow import Narrow
from offloaded import digests, small_chunks
from tiny import CPU, build_engine, train_steps

from weft.core.plan import Plan
from weft.core.state_folder import StateFolder
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy


def filed(plan: dict[str, Any], update: str = "device", *, durable: str = "checkpoint") -> dict[str, Any]:
    """The plan with its states in files; `update` "" leaves it as it is."""
    offload = {"optimizer": "nvme", "update": update, "durable": durable}
    return {**plan, "offload": offload} if update else plan


def file_engine(
    family: Any, plan: dict[str, Any], folder: Path, update: str, *, resume: int | None = None, **options: Any
) -> Engine:
    """`resume`: continue from files of a later step than this."""
    durable = options.pop("durable", "checkpoint")
    with small_chunks():
        states = StateFolder(path=folder, after_step=resume)
        return build_engine(family, filed(plan, update, durable=durable), state_folder=states, **options)


def trained_in_files(
    family: Any, plan: dict[str, Any], folder: Path, update: str, *, steps: int = 4, **options: Any
) -> tuple[Any, Any]:
    """Losses and gradient norms, then the digests at the end; as `offloaded.trained`."""
    engine = file_engine(family, plan, folder, update, **options)
    found = train_steps(engine, steps), digests(engine)
    close_files(engine)
    return found


def close_files(engine: Engine) -> None:
    assert engine.offload is not None
    engine.offload.close()


def committed_steps(folder: Path, *, rank: int = 0) -> list[int]:
    """Steps of the commit records, oldest first."""
    found = []
    for path in folder.glob(f"rank-{rank}-?.json"):
        record = json.loads(json.loads(path.read_text(encoding="utf-8"))["record"])
        found += [entry["step"] for entry in record["steps"]]
    return sorted(found)


def narrow_engine(folder: Path, *, resume: int | None = None, durable: str = "step", **tables: Any) -> Engine:
    """A small engine that is built in milliseconds, with several chunks."""
    torch.manual_seed(0)
    with small_chunks():
        plan = Plan.from_tables(filed(tables, "host", durable=durable))
        states = StateFolder(path=folder, after_step=resume)
        policy = OptimizerPolicy(learning_rate=1e-3)
        return Engine(Narrow(), plan, optimizer=policy, device=CPU, state_folder=states)
