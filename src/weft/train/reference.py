"""The reference of an objective: log-probabilities of the run's first weights, for every pair that the run will read.

They are computed once, by the engine itself and in its layout, before a checkpoint is loaded; so the weights are the
initial ones in a resumed run too. `reference.safetensors` of the run folder keeps them: a resume reads them back.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from weft.comm.groups import sum_over
from weft.core.errors import BadValueError
from weft.core.run_spec import RunSpec
from weft.data import Loader
from weft.engine.engine import Engine
from weft.engine.preference import REFERENCE
from weft.engine.reference import row_log_probs
from weft.train.build import Workbench
from weft.train.folder.run_folder import RunFolder
from weft.train.ranks.process import Process

Table = NDArray[np.float64]  # [rows, 2]; NaN: not known
_TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class PairReference:
    """The tables of all loaders, and how they were made."""

    tables: dict[str, Table] = field(default_factory=dict)
    identity: str = ""
    note: str = ""

    def write(self, folder: RunFolder) -> None:
        if self.tables:
            draft = folder.reference_path.with_suffix(".tmp")
            save_file(self.tables, draft, metadata={"identity": self.identity})
            draft.replace(folder.reference_path)


def add_reference(run: RunSpec, bench: Workbench, folder: RunFolder, process: Process) -> PairReference:
    """Add the reference to the loaders of `bench`, whose engine has the initial weights. Collective."""
    if not run.objective.has_reference:
        return PairReference()
    began_s, identity = time.perf_counter(), _identity(run, bench)
    loaders = _loaders(bench)
    stored = _stored(folder, identity, loaders) if process.is_main else {}
    tables, computed = {}, 0
    for name, loader in loaders.items():
        table = _shared(stored.get(name), loader, device=bench.engine.device)
        needed = np.unique(loader.rows_of(_samples(run, bench, name)))
        missing = needed[np.isnan(table[needed]).any(axis=1)]
        _fill(table, missing, loader, bench.engine)
        loader.columns[REFERENCE] = tables[name] = table
        computed += len(missing)
    seconds = time.perf_counter() - began_s
    known = sum(int((~np.isnan(table)).all(axis=1).sum()) for table in tables.values())
    note = f"reference: log-probabilities of {computed:,} of {known:,} pairs were computed by the initial weights"
    return PairReference(tables=tables, identity=identity, note=f"{note} in {seconds:.1f} s")


def _loaders(bench: Workbench) -> dict[str, Loader]:
    if not isinstance(bench.training, Loader):
        raise BadValueError(
            "weft.train(data=) gives rows, and objective.kind = 'dpo' reads pairs of data.source",
            hint="write the pairs to a JSONL file with prompt, chosen and rejected",
        )
    return {_TRAINING: bench.training, **{name: one.loader for name, one in bench.evaluation.items()}}


def _samples(run: RunSpec, bench: Workbench, name: str) -> NDArray[np.int64]:
    """The samples that the run will read of a loader."""
    batches = run.train.steps if name == _TRAINING else bench.evaluation[name].max_batches
    return np.arange(batches * run.train.global_batch, dtype=np.int64)


def _fill(table: Table, missing: NDArray[np.int64], loader: Loader, engine: Engine) -> None:
    """Compute the rows of `missing`, a global batch at a time: each rank its share, in micro-batches as in training."""
    size = loader.global_batch
    share = size // loader.dp_degree
    own = slice(loader.dp_rank * share, (loader.dp_rank + 1) * share)
    for begin in range(0, len(missing), size):
        rows = missing[begin : begin + size]
        padded = np.resize(rows, size)  # every rank makes the same number of forwards
        batch = {name: torch.from_numpy(values) for name, values in loader.rows.read(padded[own]).items()}
        found = torch.zeros(size, loader.rows.per_sample, dtype=torch.float64, device=engine.device)
        found[own] = row_log_probs(engine, batch).view(share, -1)
        table[rows] = sum_over(found, engine.topology.dp_group)[: len(rows)].cpu().numpy()


def _shared(stored: Table | None, loader: Loader, *, device: torch.device) -> Table:
    """Rank 0's stored table on every rank, or an empty one."""
    shape = (loader.num_rows, loader.rows.per_sample)
    table = torch.from_numpy(stored) if stored is not None else torch.full(shape, torch.nan, dtype=torch.float64)
    table = table.to(device)
    if dist.get_world_size() > 1:
        dist.broadcast(table, src=0)
    return table.cpu().numpy()


def _stored(folder: RunFolder, identity: str, loaders: dict[str, Loader]) -> dict[str, Table]:
    """The tables of an earlier start of this run; none if model or data are others now."""
    if not folder.reference_path.exists():
        return {}
    try:
        with safe_open(str(folder.reference_path), framework="np") as handle:
            if (handle.metadata() or {}).get("identity") != identity:
                return {}
            found = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}  # computed again
    return {name: table for name, table in found.items() if name in loaders and len(table) == loaders[name].num_rows}


def _identity(run: RunSpec, bench: Workbench) -> str:
    """What decides the values: the initial weights, and the rows."""
    sections = {name: getattr(run, name).model_dump(mode="json") for name in ("model", "adapter", "data")}
    for key in ("evaluation", "epochs", "balance_rows"):
        sections["data"].pop(key)
    return json.dumps({**sections, "seed": run.train.seed, "contents": bench.contents}, sort_keys=True)
