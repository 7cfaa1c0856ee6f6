"""Keeps buffers that a forward changes equal on all ranks after every micro-batch, step and evaluation.

| buffer | value on every rank afterwards |
| --- | --- |
| of a batch norm | the statistics over the rows of all data-parallel ranks: equal already, the first rank's bits |
| other floating ones | the mean over the ranks, after every micro-batch: exact for means over rows |
| integers, flags | the first rank's, as in torch's DDP |
| another shape than at the start | the rank's own: a cache, recomputed from each batch |

In a pipeline a buffer belongs to the first stage whose forward changes it: model code outside the blocks runs on later
stages too, on NaN, and its values there are neither sent, saved nor compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.observer import buffer_collectives
from weft.core.records import BufferRecord
from weft.engine.buffers.changes import BufferChanges, Slot
from weft.engine.mesh import Topology
from weft.engine.pp.stages import StageDone, Stages

CONSTANT, CACHE = 2**31 - 1, -1  # instead of a stage


class BufferSync:
    """All buffers of one engine's model. `stages`: those of this rank, in a pipeline."""

    def __init__(
        self,
        changes: BufferChanges,
        topology: Topology,
        *,
        device: torch.device,
        batch_norms: Collection[str],
        stages: Stages | None = None,
    ) -> None:
        self.changes, self._topology, self._device = changes, topology, device
        self._own = stages.own if stages is not None else (0,)
        split = stages.split.stages if stages is not None else ()
        stage_of = {block: stage for stage, blocks in enumerate(split) for block in blocks}
        norms = set(batch_norms)
        self._norms = {place for place, slot in enumerate(changes.slots) if slot.name.rpartition(".")[0] in norms}
        self._stages = {place: _stage_in(slot.name, stage_of) for place, slot in enumerate(changes.slots)}
        self._claims: dict[
            int, int
        ] = {}  # on a rank with several stages: place outside blocks -> stage that changes it
        self.owners: list[int] = [CONSTANT] * len(changes.slots)  # a stage, or one of the two above
        self._seen_stages: set[int] = set()
        self._num_steps = 0
        changes.mark()

    # --- around forwards and steps ------------------------------------------------------------------------------

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Around one forward of one stage."""
        if not self.changes.slots:
            yield
            return
        if self._topology.pp_degree > 1:
            self.changes.renew()
        before = self._outside_blocks() if len(self._own) > 1 else {}
        done: StageDone | None = None
        try:  # after any other exception no collective may follow: the other ranks are elsewhere, and it would hang
            yield
        except StageDone as end:
            done = end
        if self._num_steps == 0:
            self._look(is_new=stage not in self._seen_stages)
            self._seen_stages.add(stage)
        self._claim(stage, before)
        self._average([place for place in self._own_places() if self._stages[place] in (None, stage)])
        if done is not None:
            raise done

    def after_step(self) -> None:
        """Collective. Ranks agree on the changing buffers after the first step, and again after 2, 4, 8, … steps."""
        if not self.changes.slots:
            return
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:
            self._agree()
        self.synchronise()

    def _look(self, *, is_new: bool) -> None:
        """In the first step. The next micro-batch must read equal values on all ranks, so the ranks of a stage agree
        after its first forward."""
        self.changes.look(by_value=is_new)
        if is_new and self._num_stage_ranks > 1:
            mine = [self._found(place) for place in range(len(self.changes.slots))]
            found = read_min(mine, device=self._device, group=self._topology.stage_group)
            self.owners = [min(known, new) for known, new in zip(self.owners, found, strict=True)]
            self._update_changing()

    def _update_changing(self) -> None:
        self.changes.changing.update(place for place, owner in enumerate(self.owners) if 0 <= owner < CONSTANT)

    def restart(self) -> None:
        """After other values were loaded."""
        self.changes.mark()

    def _agree(self) -> None:
        is_first = self._num_steps == 1
        if not is_first:
            if not read_any(self.changes.may_have_more(), device=self._device):
                return
            self.changes.look(by_value=False)
        mine = [self._found(place) for place in range(len(self.changes.slots))]
        self.owners = read_min(mine, device=self._device)
        self._update_changing()

    def _found(self, place: int) -> int:
        if place not in self.changes.changing:
            return CONSTANT
        if self.changes.is_reshaped(place):
            return CACHE
        stage = self._stages[place]
        return self._claims.get(place, self._own[0]) if stage is None else stage

    # --- values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronise(self) -> None:
        """Collective over the ranks that have the same stages."""
        places = self._own_places()
        self._average(places)
        taken = [value for place, value in self._values_at(places) if not self._is_averaged(place, value)]
        for same in _by_dtype(taken) if self._num_stage_ranks > 1 else ():
            flat = torch.cat([value.reshape(-1) for value in same])
            wire = flat.view(torch.uint8)  # every backend sends bytes
            with buffer_collectives():
                dist.broadcast(wire, group=self._topology.stage_group, group_src=0)
            _copy_from_flat(flat, same)

    @torch.no_grad()
    def _average(self, places: Sequence[int]) -> None:
        values = [value for place, value in self._values_at(places) if self._is_averaged(place, value)]
        for same in _by_dtype(values) if self._num_stage_ranks > 1 else ():
            wide = torch.promote_types(same[0].dtype, torch.float32)  # no sums over ranks in 16 bits
            flat = torch.cat([value.reshape(-1).to(wide) for value in same])
            with buffer_collectives():
                dist.all_reduce(flat, group=self._topology.stage_group)
            _copy_from_flat(flat / self._num_stage_ranks, same)

    def is_foreign(self, name: str) -> bool:
        """Whether a buffer changes and belongs to a stage of another rank."""
        place = self._places.get(name)
        return place is not None and self.owners[place] not in (CONSTANT, CACHE, *self._own)

    def records(self) -> list[BufferRecord]:
        """Records of the buffers on this rank."""
        return [
            BufferRecord(
                name=slot.name,
                shape=tuple(slot.value.shape),
                dtype=str(slot.value.dtype).removeprefix("torch."),
                persistent=slot.is_persistent,
                state=self._state(place, slot.value),
            )
            for place, slot in enumerate(self.changes.slots)
            if slot.value is not None and not self.is_foreign(slot.name)
        ]

    def values(self) -> dict[str, Tensor]:
        """The buffers that change and belong to a stage of this rank."""
        return {self.changes.slots[place].name: value for place, value in self._values_at(self._own_places())}

    def notes(self) -> tuple[str, ...]:
        """Notes on changing buffers outside of batch norms; empty before the first step."""
        others = [self.changes.slots[place] for place in sorted(self.changes.changing - self._norms)]
        if not others or self._topology.dp_degree == 1:
            return ()
        return (
            f"{_listed(others)} change in the forward: floating ones are averaged over the ranks after every"
            " micro-batch, others are rank 0's after every step; values other than means over rows depend on the"
            " number of ranks",
        )

    @property
    def _places(self) -> dict[str, int]:
        return {slot.name: place for place, slot in enumerate(self.changes.slots)}

    def _own_places(self) -> list[int]:
        return [place for place, owner in enumerate(self.owners) if owner in self._own]

    def _values_at(self, places: Sequence[int]) -> list[tuple[int, Tensor]]:
        found = [(place, self.changes.slots[place].value) for place in places]
        return [(place, value) for place, value in found if value is not None]

    def _is_averaged(self, place: int, value: Tensor) -> bool:
        return place not in self._norms and value.is_floating_point() and value.dtype.itemsize > 1

    def _state(self, place: int, value: Tensor) -> str:
        if self.owners[place] == CONSTANT:
            return "constant"
        if self.owners[place] == CACHE:
            return "computed again from each batch"
        if self._num_stage_ranks == 1:
            return "changes in the forward, on one rank"
        if place in self._norms:
            return "statistics over all data-parallel ranks"
        return "averaged after every micro-batch" if self._is_averaged(place, value) else "rank 0's after every step"

    @property
    def _num_stage_ranks(self) -> int:
        return dist.get_world_size(self._topology.stage_group)

    # --- several stages on one rank -----------------------------------------------------------------------------

    def _outside_blocks(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Tensors and copies of the buffers that forwards of several stages reach."""
        known = self.changes.changing if self._num_steps else range(len(self.changes.slots))
        kept = {place: self.changes.slots[place].value for place in known if self._stages[place] is None}
        return {place: (value, value.detach().clone()) for place, value in kept.items() if value is not None}

    @torch.no_grad()
    def _claim(self, stage: int, before: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """The first stage that changes a buffer owns it; changes by later stages, maybe from NaN, are undone."""
        for place, (tensor, value) in before.items():
            if place in self.changes.changing and self._claims.setdefault(place, stage) != stage:
                self.changes.slots[place].put(tensor)
                tensor.copy_(value)


def read_any(flag: bool, *, device: torch.device) -> bool:
    """Whether `flag` is set on some rank; waits for the device if there are several. Collective."""
    if dist.get_world_size() == 1:
        return flag
    found = torch.tensor([int(flag)], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def read_min(mine: list[int], *, device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """The element-wise minimum over all ranks; waits for the device if there are several. Collective."""
    if dist.get_world_size(group) == 1:
        return mine
    found = torch.tensor(mine, device=device)
    with buffer_collectives():
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return [int(number) for number in found.tolist()]


def _stage_in(name: str, stage_of: Mapping[str, int]) -> int | None:
    """The stage of the buffer's block; None outside of the blocks."""
    return next((stage for block, stage in stage_of.items() if name.startswith(f"{block}.")), None)


def _by_dtype(values: Sequence[Tensor]) -> list[list[Tensor]]:
    dtypes = dict.fromkeys(value.dtype for value in values)
    return [[value for value in values if value.dtype == dtype] for dtype in dtypes]


def _copy_from_flat(flat: Tensor, values: Sequence[Tensor]) -> None:
    for value, own in zip(values, torch.split(flat, [one.numel() for one in values]), strict=True):
        value.copy_(own.view(value.shape))


def _listed(slots: Sequence[Slot]) -> str:
    names = [slot.name for slot in slots]
    return f"the buffers {', '.join(names)}" if len(names) < 4 else f"{len(names)} buffers such as {names[0]}"
