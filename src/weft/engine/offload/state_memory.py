"""`StateMemory`: where a rank's offloaded states are kept, and what shows them: `optimizer.state`, masters, weights.

    in host memory    one slab; `optimizer.state` holds views of it, so checkpoints need no other code
    in files          the slab has slots for chunks on their way; `optimizer.state` has views of the mapped file

The slab is taken once, before training, in one piece: states, frozen weights, slots, staging, pending gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.core import offload_sizes
from weft.core.errors import NotBuiltError
from weft.engine.offload.chunk_kernel import block_of, new_counter, state_dtypes
from weft.engine.offload.chunks import ALIGNMENT, FILE_ALIGNMENT, MASTER, WEIGHT, StateBank, divide
from weft.engine.offload.direct_file import PAGE_BYTES
from weft.engine.offload.durable import DurableStates
from weft.engine.offload.file_layout import Dtypes, FileLayout
from weft.engine.offload.file_store import FileStore
from weft.engine.offload.host_room import require_room
from weft.engine.offload.outside import OutsideBytes
from weft.engine.offload.slab import HostSlab, slab_bytes
from weft.engine.offload.state_files import StateFiles
from weft.engine.offload.state_store import HostStore
from weft.engine.offload.update_form import UpdateForm
from weft.engine.optim.adamw_8bit import joined
from weft.engine.ownership import local


class StateMemory:
    """See the module."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        form: UpdateForm,
        unit_of: Callable[[nn.Parameter], int],
        device: torch.device,
        chunk_elements: int | None,
        masters: torch.dtype | None,
        weights: torch.dtype | None,
        frozen: Sequence[nn.Parameter],
        files: StateFiles | None,
    ) -> None:
        """`masters`: their dtype, if they are states; None: parameters are their own masters. `weights`: the dtype of
        those that rest in host memory, with `frozen` ones; None: they rest on the device. `files`: where states are
        kept; None: in host memory."""
        self._optimizer, self._files = optimizer, files
        self._master_dtype, self._weight_dtype = masters, weights
        self.masters: dict[nn.Parameter, torch.Tensor] = {}  # what checkpoints hold, where parameters do not
        self.homes: dict[nn.Parameter, torch.Tensor] = {}  # weights that rest in host memory
        self.banks, self.chunks = divide(
            optimizer.param_groups,
            chunk_elements=chunk_elements or offload_sizes.CHUNK_ELEMENTS,
            unit_of=unit_of,
            alignment=ALIGNMENT if files is None else FILE_ALIGNMENT,
            masters=masters,
            block_of=functools.partial(block_of, optimizer),
            has_weights=weights is not None,
        )
        self._require_no_8_bit_moments()
        num_slots, is_fake = offload_sizes.SLOTS, active_fake_mode() is not None
        self.slot_bytes = form.slot_bytes(self.chunks, has_masters=masters is not None)
        staging_bytes, pending_bytes = num_slots * self.slot_bytes, form.pending_bytes(self.banks)
        frozen_bytes = sum(slab_bytes(local(one).numel(), one.dtype) for one in frozen)
        layout = FileLayout(self.banks, self.chunks, dtypes_of=self._kept_dtypes) if files is not None else None
        self.outside = OutsideBytes.of(
            {bank: self._kept_dtypes(bank) for bank in self.banks},
            num_files=files.num_files if files is not None else 0,
            staging_bytes=staging_bytes + (num_slots * layout.slot_bytes if layout is not None else 0),
            pending_bytes=pending_bytes,
            frozen_bytes=frozen_bytes,
        )
        self.host_bytes = taken_bytes = sum(self.outside.host.values())
        if is_fake:  # no files: their states are in the slab of a dry run
            taken_bytes = self._state_bytes() + frozen_bytes + staging_bytes + pending_bytes
        else:
            require_room(self.host_bytes, device=device, terms=self.outside.host)
        self.slab = HostSlab(taken_bytes, device=device, alignment_bytes=1 if is_fake else PAGE_BYTES)
        self.store: HostStore = HostStore()
        self.file_store: FileStore | None = None
        self.durable: DurableStates | None = None
        self.restored: dict[str, Any] | None = None  # `meta` of the step that was restored from files
        if files is not None and layout is not None and not is_fake:
            slots = [self.slab.take(layout.slot_bytes, torch.uint8) for _ in range(num_slots)]
            self.store = self.file_store = files.open(layout, slots=slots)
        self._create_states(device if form.place == "device" else torch.device("cpu"))
        for parameter in frozen:
            own = local(parameter.detach())
            home = self.slab.take(own.numel(), own.dtype).view(own.shape)
            self.homes[parameter] = self.masters[parameter] = home

    # --- files ------------------------------------------------------------------------------------------------------

    def restore(self, device: torch.device) -> None:
        """Continue from the newest step that all ranks have committed to files, if there is one. Collective."""
        if self._files is None or self.file_store is None:
            return
        self.durable = self._files.durable(self.file_store, self._optimizer, banks=self.banks, device=device)
        if self.durable is not None:
            self.restored = self.durable.restore(self._files.after_step)
            self._point_to_current()

    @property
    def is_in_files(self) -> bool:
        return self.file_store is not None

    @property
    def notes(self) -> Sequence[str]:
        """Why states in files were not used."""
        return self.durable.notes if self.durable is not None else ()

    def begin_update(self) -> None:
        """Before the gradient norm: the step before is stored, and committed if the plan asks for it. Collective."""
        if self.file_store is not None:
            self.file_store.settle()
            self.file_store.drop_maps()
        if self.durable is not None:
            self.durable.begin_update()

    def updated(self) -> None:
        if self.durable is not None:
            self.durable.updated()

    def commit(self, step: int, meta: Callable[[], dict[str, Any]]) -> None:
        """The step is done: begin to commit it, if every step is committed."""
        if self.durable is not None:
            self.durable.commit(step, meta())

    def after_load(self) -> None:
        """The states were replaced by those of a checkpoint."""
        if self.durable is not None:
            self.durable.replaced()
        if self.file_store is not None:
            self.file_store.drop_maps()
            self.file_store.sum_up()

    def wait(self) -> None:
        """The host may read all states."""
        if self.file_store is not None:
            self.file_store.settle()
            self.file_store.each()  # a damaged file must not become a checkpoint
            self._point_to_current()

    def close(self) -> None:
        """Store what is on its way, and close the files."""
        if self.file_store is None or self._files is None:
            return
        try:
            if self.durable is not None:
                self.durable.join()
            self.file_store.settle()
        finally:
            self.file_store.close()
            if self.durable is None:
                self._files.remove_folder()

    # --- states -----------------------------------------------------------------------------------------------------

    def _create_states(self, device: torch.device) -> None:
        """States of zero for every parameter; counters on `device`."""
        for bank in self.banks:
            bank.states = {key: self._flat(bank, key, dtype) for key, dtype in self._dtypes(bank).items()}
            for parameter in bank.offsets:
                self._optimizer.state[parameter] = new_counter(self._optimizer, bank.group, device)
        self._point_to_current()

    def _flat(self, bank: StateBank, key: str, dtype: torch.dtype) -> torch.Tensor:
        count = bank.num_entries(key, bank.num_elements)
        if self.file_store is not None:
            return self.file_store.mapped(bank, key, begin=0, count=count)
        return self.slab.take(count, dtype)

    def _point_to_current(self) -> None:
        """Let `optimizer.state` and `masters` show the slab, or the file with the newest states."""
        for bank in self.banks:
            for parameter in bank.offsets:
                store = self.file_store
                states = bank.views_of(parameter) if store is None else store.views_of(bank, parameter)
                master = states.pop(MASTER, None)
                weight = states.pop(WEIGHT, master)
                if master is not None:
                    self.masters[parameter] = master
                if weight is not None and bank.has_weights:
                    self.homes[parameter] = weight
                self._optimizer.state[parameter].update(joined(states))

    def _state_bytes(self) -> int:
        return sum(
            slab_bytes(bank.num_entries(key, bank.num_elements), dtype)
            for bank in self.banks
            for key, dtype in self._dtypes(bank).items()
        )

    def _dtypes(self, bank: StateBank) -> dict[str, torch.dtype]:
        """Of the states by key."""
        masters = {MASTER: self._master_dtype} if self._master_dtype is not None else {}
        is_rounded = self._weight_dtype not in (None, self._master_dtype)
        weights = {WEIGHT: self._weight_dtype} if is_rounded and self._weight_dtype else {}
        return {**masters, **weights, **state_dtypes(self._optimizer, bank)}

    def _kept_dtypes(self, bank: StateBank) -> Dtypes:
        """Of all that is kept outside the device."""
        states = self._dtypes(bank)
        return states if self._files is None else self._files.with_kept(states, bank)

    def _require_no_8_bit_moments(self) -> None:
        if (self._master_dtype is not None or self._files is not None) and any(bank.block for bank in self.banks):
            raise NotBuiltError(
                "8-bit moments are not executed with states in files, nor with masters or weights on the host",
                hint="set offload.optimizer = 'cpu' alone, or use another optimizer",
            )
