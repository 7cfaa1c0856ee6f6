"""The context-parallel axis of one rank: its positions of every row, and the rows whose forward runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only  # no public form

from weft.core import axes
from weft.core.errors import ModelError
from weft.core.plan import ContextParallel
from weft.core.sequence_split import padded_length
from weft.engine.axis import AxisContext
from weft.engine.cp.masks import MASKS, WholeRows, mask_of, own_rows
from weft.engine.cp.positions import Positions
from weft.engine.cp.slices import Attending, ContextSlices
from weft.engine.mesh import ContextGroups
from weft.engine.objective import Batch
from weft.engine.wrap_forward import Forward

SEARCH = "find_packed_sequence_indices"  # a test fails when it moves


class CPContext(AxisContext):
    """Losses of ranks are parts of a sum, so all count; every rank counts the labels of whole rows, so one is enough.

    `multiple`: each rank's positions are a multiple of it (sequence parallel divides them again). `masks_in_pieces`:
    the model passes masks through to attention.
    """

    axis = axes.CP
    active: ClassVar[CPContext | None] = None  # whose model's forward runs

    def __init__(
        self, policy: ContextParallel, groups: ContextGroups, *, inner: str, multiple: int, masks_in_pieces: bool
    ) -> None:
        self.policy, self._groups, self.inner, self.multiple = policy, groups, inner, multiple
        self._in_pieces = masks_in_pieces
        self._degree, self._rank = dist.get_world_size(groups.whole), dist.get_rank(groups.whole)
        self._rows: WholeRows | None = None
        self._find_documents = getattr(sys.modules[MASKS], SEARCH)
        self.attending = Attending()

    @property
    def owns_weight(self) -> bool:
        return self._rank == 0

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return list({id(group): group for group in self._groups if group is not None}.values())

    @property
    def activation_groups(self) -> Sequence[dist.ProcessGroup]:
        return self.groups

    def rows_of(self, batch: Batch) -> Batch:
        """This rank's positions of the rows."""
        positions = self._positions(batch)
        self._rows = WholeRows.of(batch, positions, self._find_documents)
        return own_rows(batch, positions)

    def slices_of(self, batch: Batch) -> ContextSlices:
        return ContextSlices(self._positions(batch), batch["input_ids"].shape[1], self.attending)

    def _positions(self, batch: Batch) -> Positions:
        length, split = batch["input_ids"].shape[1], self.policy.split
        padded = padded_length(length, degree=self._degree, split=split, multiple=self.multiple)
        return Positions(length=padded, degree=self._degree, rank=self._rank, split=split)

    @contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:
        before, CPContext.active = CPContext.active, self
        try:
            with mock.patch.object(sys.modules[MASKS], SEARCH, self._documents):
                yield
        finally:
            CPContext.active, self._rows = before, None

    def _documents(self, _positions: Any) -> Any:
        return self._rows.documents if self._rows is not None else None

    def rotary(self, forward: Forward, x: Any, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A rotary embedding that follows the longest position of a forward sees that of whole rows."""
        rows = self._rows
        if rows is None:
            raise RuntimeError("a rotary embedding was asked for outside of a forward")
        last = torch.as_tensor(rows.last_position, device=position_ids.device).to(position_ids.dtype)
        found = forward(x, torch.cat([position_ids, last.expand(*position_ids.shape[:-1], 1)], -1), *args, **kwargs)
        return tree_map_only(Tensor, lambda table: table.narrow(-2, 0, position_ids.shape[-1]), found)

    def mask(self, inner: Any, **kwargs: Any) -> Any:
        """The mask of the rows whose forward runs."""
        if self._rows is None:
            raise RuntimeError("a mask was asked for outside of a forward")
        queries = self._rows.positions.of_groups(self.policy.head_ranks(self._degree))
        is_fused = self.inner == "sdpa"
        try:
            made = mask_of(inner, self._rows, queries=queries, is_fused=is_fused, in_pieces=self._in_pieces)
            return made(**kwargs)
        except IndexError as error:
            raise ModelError(
                "context parallelism does not work here: a mask function of the model reads a tensor of one rank's"
                f" positions ({error})",
                hint="use mesh.cp = 1",
            ) from error
