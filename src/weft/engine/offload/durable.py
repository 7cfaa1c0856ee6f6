"""`DurableStates`: every step survives a kill (`offload.durable = "step"`), and a resume continues from its files.

    update of step t      reads the file of t - 1, writes the other one, which still holds t - 2
    commit of t           behind the next forward: writes done -> sync -> buffers -> record (engine/offload/commits.py)
    before an update      wait for this rank's commit, then for all ranks: so all have committed t - 1

Ranks differ by at most one step, and each has the smaller one. The barrier is a reduction of its own: the gradient norm
of DDP and of HSDP is not reduced over all ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from weft.core.errors import StateFileError
from weft.engine.offload.chunks import StateBank, StateChunk
from weft.engine.offload.commits import KEPT, CommitLog, CommittedStep, Record
from weft.engine.offload.file_store import FileStore
from weft.engine.ownership import local

_MOST = 2 * KEPT  # candidates of a rank


class DurableStates:
    """See the module. `place`: the keys of a plan that decide which rank holds what."""

    def __init__(
        self,
        store: FileStore,
        log: CommitLog,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        banks: Sequence[StateBank],
        place: Any,
        device: torch.device,
    ) -> None:
        self._store, self._log, self._model, self._optimizer = store, log, model, optimizer
        self._parameters = [parameter for bank in banks for parameter in bank.offsets]
        self._banks, self._device, self._place = banks, device, place
        self._layout = self._digest()
        self._entries: dict[int, list[CommittedStep]] = {}  # by file
        self._is_written, self._is_changed = False, False
        self._commit: Future[None] | None = None
        self.notes: list[str] = []

    # --- a step -------------------------------------------------------------------------------------------------

    def updated(self) -> None:
        """The current file has changed."""
        self._is_written = self._is_changed = True

    def commit(self, step: int, meta: dict[str, Any]) -> None:
        """Begin to commit the states as they are now. Nothing was written before the first update: no commit."""
        if not self._is_written:
            return
        counters = [state["step"].detach().reshape(()) for state in self._counted()]
        packed = torch.stack([one.float() for one in counters]) if counters else torch.zeros(0)
        buffers = {name: buffer.detach().clone() for name, buffer in _buffers(self._model)}
        earlier = [] if self._is_changed else self._entries[self._store.current][1 - KEPT :]
        self._is_changed, number = False, self._store.current

        def finish() -> None:
            entry = CommittedStep(step=step, meta=meta, counters=packed.tolist(), rest=self._write_rest(step, buffers))
            entries = self._entries[number] = [*earlier, entry]
            sums = [int(one) for one in self._store.sums[number]]
            self._log.write(number, Record(layout=self._layout, sums=sums, steps=entries))

        self._commit = self._store.after_writes(finish)

    def begin_update(self) -> None:
        """Return when every rank has committed its last step: the older file may be written. Collective."""
        self.join()
        if dist.get_world_size() > 1:
            arrived = torch.ones((), device=self._device)
            dist.all_reduce(arrived)
            arrived.item()
        self._log.remove(1 - self._store.current)
        self._entries.pop(1 - self._store.current, None)
        self._log.keep_rests(tuple(entry.step for entries in self._entries.values() for entry in entries))

    def join(self) -> None:
        """Return when this rank has committed its last step."""
        if self._commit is not None:
            self._commit.result()
            self._commit = None

    def replaced(self) -> None:
        """The current file got other contents, from a checkpoint: its records are those of another run of steps."""
        self._log.forget()
        self._entries, self._is_written = {}, False

    # --- a restart ----------------------------------------------------------------------------------------------

    def restore(self, after_step: int | None) -> dict[str, Any] | None:
        """Load the newest step after `after_step` that all ranks have committed; its meta. Collective.

        None: there is none, and the files are new; `notes` say why.
        """
        found = self._candidates() if after_step is not None else {}
        while steps := self._common(set(found), after_step if after_step is not None else -1):
            number, record, entry = found.pop(max(steps))
            problem = self._problem(number, record, entry)
            if not any(_gathered(int(bool(problem)), self._device)):
                return self._load(number, record, entry)
            self.notes.append(f"states of step {entry.step} in {self._log.folder} are not used: {problem or 'damaged'}")
        self._store.renew()
        self._log.forget()
        return None

    def _candidates(self) -> dict[int, tuple[int, Record, CommittedStep]]:
        """By step: the file, its record and its entry."""
        found: dict[int, tuple[int, Record, CommittedStep]] = {}
        for number in range(2):
            record = self._log.read(number)
            if record is None:
                continue
            if record.layout != self._layout:
                self.notes.append(f"{self._log.state_path(number)} is not used: it is of another layout or model")
                continue
            found.update({entry.step: (number, record, entry) for entry in record.steps})
        return found

    def _common(self, own: set[int], after_step: int) -> set[int]:
        mine = sorted((step for step in own if step > after_step), reverse=True)[:_MOST]
        row = torch.tensor(mine + [-1] * (_MOST - len(mine)), dtype=torch.int64, device=self._device)
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return set.intersection(*(set(one.tolist()) for one in rows)) - {-1}

    def _problem(self, number: int, record: Record, entry: CommittedStep) -> str:
        """Why this rank's file does not hold the step, or ""."""
        self._store.use(number, record.sums)
        if entry.rest and self._log.read_rest(entry) is None:
            return "its buffers are missing or damaged"
        try:
            self._store.each()
        except StateFileError as error:
            return error.message
        return ""

    def _load(self, number: int, record: Record, entry: CommittedStep) -> dict[str, Any]:
        self._store.each(self._load_weights)
        for state, count in zip(self._counted(), entry.counters, strict=True):
            state["step"].fill_(count)
        data = self._log.read_rest(entry) if entry.rest else None
        saved = torch.load(io.BytesIO(data), weights_only=True) if data is not None else {}
        for name, buffer in _buffers(self._model):
            buffer.copy_(saved[name])
        self._entries, self._is_written = {number: record.steps}, True
        other = self._log.read(1 - number)
        if other is not None:
            self._entries[1 - number] = other.steps
        return entry.meta

    @torch.no_grad()
    def _load_weights(self, chunk: StateChunk) -> None:
        values = self._store.weight_in_slot(chunk)
        for piece in chunk.pieces:
            piece.of(piece.parameter.detach()).copy_(piece.within(values, chunk.begin))

    # --- what is kept -------------------------------------------------------------------------------------------

    def _counted(self) -> list[dict[str, Any]]:
        states = (self._optimizer.state[parameter] for parameter in self._parameters)
        return [state for state in states if "step" in state]

    def _write_rest(self, step: int, buffers: dict[str, torch.Tensor]) -> str:
        if not buffers:
            return ""
        stream = io.BytesIO()
        torch.save({name: buffer.cpu() for name, buffer in buffers.items()}, stream)
        return self._log.write_rest(step, stream.getvalue())

    def _digest(self) -> str:
        """Of which numbers lie where, and of the weights that are not trained: they are in no file."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        kept = set(self._parameters)
        rows = [
            [names[parameter], list(local(parameter).shape), bank.offsets[parameter], str(bank.dtype)]
            for bank in self._banks
            for parameter in bank.offsets
        ]
        regions = [
            [key, begin, str(dtype)]
            for of_bank in self._store.layout.regions.values()
            for key, (begin, dtype) in of_bank.items()
        ]
        world = [dist.get_rank(), dist.get_world_size()]
        digest = hashlib.sha256(json.dumps([rows, regions, world, self._place], sort_keys=True).encode())
        for parameter in (one for one in names if one not in kept):
            data = local(parameter.detach()).cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(data.numpy().data)
        return digest.hexdigest()


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    from weft.engine.state import persistent_buffers

    return list(persistent_buffers(model))


def _gathered(value: int, device: torch.device) -> list[int]:
    rows = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.tensor(value, dtype=torch.int64, device=device))
    return [int(row) for row in rows]
