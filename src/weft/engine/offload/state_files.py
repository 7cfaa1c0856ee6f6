"""`StateFiles`: the files of a rank's states as the plan asks for them, before they are opened.

offload.durable = "checkpoint"   rank-0-a.states: scratch, removed at the end, never trusted by another process
                  "step"         two files and their commit records, which stay
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core.errors import BadValueError
from weft.core.plan import Plan
from weft.core.state_folder import StateFolder
from weft.engine.offload.chunks import MASTER, WEIGHT, StateBank
from weft.engine.offload.commits import CommitLog
from weft.engine.offload.direct_file import DirectFile
from weft.engine.offload.durable import DurableStates
from weft.engine.offload.file_layout import Dtypes, FileLayout
from weft.engine.offload.file_store import FileStore
from weft.engine.offload.local_disk import require_local_disk

_PLACES = ("mesh", "data_parallel", "tensor_parallel", "expert_parallel", "pipeline", "precision")


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """See the module. `places`: the tables of the plan that decide which numbers a rank holds."""

    folder: Path
    is_durable: bool
    after_step: int | None
    places: dict[str, Any]
    model: nn.Module

    @staticmethod
    def of(plan: Plan, model: nn.Module, given: StateFolder | None) -> StateFiles:
        named = Path(plan.offload.folder) if plan.offload.folder else None
        if named is None and given is None:
            raise BadValueError(
                "offload.optimizer = 'nvme' has no folder for its files",
                hint="set offload.folder to a folder of a local disk, or give Engine(state_folder=...)",
            )
        folder = given.path if given is not None else Path()
        if named is not None:
            folder = named / given.run if given is not None else named
        return StateFiles(
            folder=folder.absolute(),
            is_durable=plan.offload.durable == "step",
            after_step=given.after_step if given is not None else None,
            places={name: getattr(plan, name).model_dump(mode="json") for name in _PLACES},
            model=model,
        )

    @property
    def num_files(self) -> int:
        return 2 if self.is_durable else 1

    def with_kept(self, dtypes: Dtypes, bank: StateBank) -> Dtypes:
        """What the files hold of a bank: its states, and weights that have no master among them, for a restart."""
        has_weights = self.is_durable and MASTER not in dtypes
        return {**dtypes, **({WEIGHT: bank.dtype} if has_weights else {})}

    def open(self, layout: FileLayout, *, slots: Sequence[torch.Tensor]) -> FileStore:
        """Files with all their space. Durable ones keep what they hold, until `DurableStates.restore`."""
        require_local_disk(self.folder)
        paths = [self._log.state_path(number) for number in range(self.num_files)]
        files = [DirectFile(path, layout.nbytes, is_scratch=not self.is_durable) for path in paths]
        if not self.is_durable:
            self._log.forget()  # an earlier run's may have been durable
        for file in files:
            if not (self.is_durable and file.is_whole):
                file.renew()
        return FileStore(layout, files, slots=slots)

    def durable(
        self, store: FileStore, optimizer: Optimizer, *, banks: Sequence[StateBank], device: torch.device
    ) -> DurableStates | None:
        if not self.is_durable:
            return None
        return DurableStates(store, self._log, self.model, optimizer, banks=banks, place=self.places, device=device)

    def remove_folder(self) -> None:
        """After scratch files were removed, unless it has others."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @property
    def _log(self) -> CommitLog:
        return CommitLog(self.folder, rank=dist.get_rank())
