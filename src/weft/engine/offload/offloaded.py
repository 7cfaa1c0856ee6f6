"""`OffloadedStates`: an optimizer's moments in the host's memory or in files, and the step that updates them.

    kept on the device   weights (float32 shards, which are the masters), gradients
    kept on the host     moments, in one slab; `optimizer.state` holds views of it, so checkpoints need no other code
    or in files          moments; the slab has slots for those on their way, `optimizer.state` has views of the file

Where `core.masters` says that masters leave the device, weights rest there in the compute dtype, and the float32 master
is one more state in the slab: it is what updates change and what checkpoints hold as the model. With
`offload.parameters = "cpu"` the slab has the weights at rest too, frozen ones among them (`engine/offload/weights.py`);
weights that are not rounded are the masters.

A step is one pass over the chunks after the gradient norm is known: clipping has the bits of a step without offload,
and a step that float16 skips never begins. A delayed step (`delayed.py`) ends after the next step's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.core import offload_sizes
from weft.core.errors import NotBuiltError
from weft.core.masters import has_masters_away, resting_dtype
from weft.core.open_choices import update_place
from weft.core.plan import Plan
from weft.core.state_folder import StateFolder
from weft.engine.dp.strategy import Strategy
from weft.engine.offload import ahead
from weft.engine.offload.ahead import AheadOfUpdate
from weft.engine.offload.chunk_kernel import State, block_of, new_counter, require_known, state_dtypes
from weft.engine.offload.chunks import ALIGNMENT, FILE_ALIGNMENT, MASTER, WEIGHT, StateBank, divide
from weft.engine.offload.copy_streams import streams_for
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
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate
from weft.engine.offload.weights import OffloadedWeights
from weft.engine.optim.adamw_8bit import joined
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.ownership import LocalShards, local
from weft.engine.precision import torch_dtype
from weft.engine.weights.materialise import fill_parameters
from weft.models.initial import WeightSource
from weft.models.layout import ModelLayout


def offload_states(
    optimizer: Optimizer,
    plan: Plan,
    model: nn.Module,
    layout: ModelLayout,
    strategy: Strategy,
    *,
    device: torch.device,
    folder: StateFolder | None = None,
) -> OffloadedStates | None:
    """Move the optimizer's states to the host or to files if the plan says so. Collective.

    `folder`: of the files, unless the plan names another."""
    place = update_place(plan, device_type=device.type)
    if place is None:
        return None
    has_weights, is_in_files = plan.offload.parameters != "none", plan.offload.optimizer == "nvme"
    has_masters = has_weights or has_masters_away(plan)
    if active_fake_mode() is not None:
        folder = StateFolder(path=Path("offload"))  # a dry run makes no files
    found = OffloadedStates(
        optimizer,
        form=UpdateForm(place=place, is_delayed=plan.offload.delayed, buckets=strategy.gradient_buckets),
        device=device,
        chunk_elements=plan.offload.chunk_elements,
        masters=torch_dtype(plan.precision.policy().master_weights) if has_masters else None,
        files=StateFiles.of(plan, model, folder) if is_in_files else None,
        weights=torch_dtype(resting_dtype(plan)) if has_weights else None,
        frozen=[one for one in model.parameters() if not one.requires_grad] if has_weights else (),
    )
    if has_weights:
        found.weights = OffloadedWeights(model, found.homes, device=device)
    # a pipeline's backwards do not free activations block by block
    if ahead.hides_copies(device) and plan.mesh.pp == 1 and not plan.offload.delayed and not is_in_files:
        found.hide_behind(
            [model.get_submodule(name) for name in layout.blocks],
            num_microbatches=plan.pipeline.microbatches,
            staging_bytes=plan.offload.staging_bytes,
            allocated=functools.partial(ahead.allocated_bytes, device),
        )
    return found


class OffloadedStates:
    """See the module. `optimizer` keeps groups, constants and state; `step` of this object replaces its own."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        form: UpdateForm,
        device: torch.device,
        chunk_elements: int | None = None,
        masters: torch.dtype | None = None,
        files: StateFiles | None = None,
        weights: torch.dtype | None = None,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        """`masters`: their dtype, if they are states; None: parameters are their own masters. `files`: where states are
        kept; None: in host memory. `weights`: the dtype of those that rest in host memory, with `frozen` ones; None:
        they rest on the device."""
        require_known(optimizer)
        self._master_dtype, self._weight_dtype = masters, weights
        self.masters: dict[nn.Parameter, torch.Tensor] = {}  # what checkpoints hold, where parameters do not
        self.homes: dict[nn.Parameter, torch.Tensor] = {}  # weights that rest in host memory
        self.weights: OffloadedWeights | None = None
        self._optimizer = optimizer
        self.place = form.place
        self._num_groups = len(optimizer.param_groups)
        kernel = form.kernel_of(optimizer)
        self._files = files
        self._banks, self._chunks = divide(
            optimizer.param_groups,
            chunk_elements=chunk_elements or offload_sizes.CHUNK_ELEMENTS,
            unit_of=kernel.unit_of,
            alignment=ALIGNMENT if files is None else FILE_ALIGNMENT,
            masters=masters,
            block_of=functools.partial(block_of, optimizer),
            has_weights=weights is not None,
        )
        if (masters is not None or files is not None) and any(bank.block for bank in self._banks):
            raise NotBuiltError(
                "8-bit moments are not executed with states in files, nor with masters or weights on the host",
                hint="set offload.optimizer = 'cpu' alone, or use another optimizer",
            )
        num_slots = offload_sizes.SLOTS
        slot_bytes = form.slot_bytes(self._chunks, has_masters=masters is not None)
        frozen_bytes = sum(slab_bytes(local(one).numel(), one.dtype) for one in frozen)
        staging_bytes = num_slots * slot_bytes
        layout = FileLayout(self._banks, self._chunks, dtypes_of=self._kept_dtypes) if files is not None else None
        self.outside = OutsideBytes.of(
            {bank: self._kept_dtypes(bank) for bank in self._banks},
            num_files=files.num_files if files is not None else 0,
            staging_bytes=staging_bytes + (num_slots * layout.slot_bytes if layout is not None else 0),
            pending_bytes=form.pending_bytes(self._banks),
            frozen_bytes=frozen_bytes,
        )
        self.host_bytes = sum(self.outside.host.values())
        is_fake = active_fake_mode() is not None
        if not is_fake:
            require_room(self.host_bytes, device=device, terms=self.outside.host)
        taken_bytes = self._state_bytes() + frozen_bytes + staging_bytes + form.pending_bytes(self._banks)
        self._slab = HostSlab(
            taken_bytes if is_fake else self.host_bytes, device=device, alignment_bytes=1 if is_fake else PAGE_BYTES
        )
        self._store: HostStore = HostStore()
        self._file_store: FileStore | None = None
        self.durable: DurableStates | None = None
        if files is not None and layout is not None and not is_fake:
            slots = [self._slab.take(layout.slot_bytes, torch.uint8) for _ in range(num_slots)]
            self._store = self._file_store = files.open(layout, slots=slots)
        self._create_states(device if form.place == "device" else torch.device("cpu"))
        for parameter in frozen:
            own = local(parameter.detach())
            home = self._slab.take(own.numel(), own.dtype).view(own.shape)
            self.homes[parameter] = self.masters[parameter] = home
        self._streams = streams_for(device)
        self._update, self._late = form.build(
            kernel, self._streams, store=self._store, slab=self._slab, banks=self._banks, chunks=self._chunks,
            slot_bytes=slot_bytes, device=device,
        )  # fmt: skip
        self.restored: dict[str, Any] | None = None  # `meta` of the step that was restored from files
        if files is not None and self._file_store is not None:
            self.durable = files.durable(self._file_store, optimizer, banks=self._banks, device=device)
            if self.durable is not None:
                self.restored = self.durable.restore(files.after_step)
                self._point_to_current()
        self._ahead: AheadOfUpdate | None = None
        self.on_step: Callable[[bool], None] | None = None  # called before (True) and after (False) a step

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        self._require_no_new_groups()
        factor = None
        if isinstance(self._optimizer, AdamWLow):
            factor, self._optimizer.gradient_factor = self._optimizer.gradient_factor, None
        with self._reported():
            if self._late is not None:
                self._late.land()  # first: the update in flight adds to the counters that are copied next
            (self._late or self._update).run(list(self._with_gradients()), factor)
        if self.durable is not None:
            self.durable.updated()
        self._weights_changed()
        if self._ahead is not None:
            self._ahead.step_done()

    def hide_behind(
        self, blocks: Sequence[nn.Module], *, num_microbatches: int, staging_bytes: int, allocated: Callable[[], int]
    ) -> None:
        """Hide copies of the device update behind `blocks`; `allocated`: bytes of the device that tensors hold now."""
        if isinstance(self._update, DeviceUpdate) and blocks:
            self._ahead = AheadOfUpdate(
                self._update,
                blocks,
                num_microbatches=num_microbatches,
                staging_bytes=staging_bytes,
                allocated=allocated,
            )

    def wait(self) -> None:
        """Return when the host may read and write the states, and the device holds no copy of them. A delayed update
        lands."""
        self._finish_copies()
        if self._file_store is not None:
            self._file_store.settle()
            self._file_store.each()  # a damaged file must not become a checkpoint
            self._point_to_current()

    def _finish_copies(self) -> None:
        if self._late is not None:
            self._late.land()
        if isinstance(self._update, DeviceUpdate):
            self._update.forget()
            self._update.release(keep_bytes=0)
        self._streams.wait()

    # --- files --------------------------------------------------------------------------------------------------

    @property
    def is_in_files(self) -> bool:
        return self._file_store is not None

    @property
    def notes(self) -> Sequence[str]:
        """Why states in files were not used."""
        return self.durable.notes if self.durable is not None else ()

    def begin_update(self) -> None:
        """Before the gradient norm: the step before is stored, and committed if the plan asks for it. Collective."""
        if self._file_store is None:
            return
        self._file_store.settle()
        self._file_store.drop_maps()
        if self.durable is not None:
            self.durable.begin_update()

    def after_load(self) -> None:
        """The states were replaced by those of a checkpoint."""
        if self._file_store is None:
            return
        if self.durable is not None:
            self.durable.replaced()
        self._file_store.drop_maps()
        self._file_store.sum_up()

    def commit(self, step: int, meta: Callable[[], dict[str, Any]]) -> None:
        """The step is done: begin to commit it, if every step is committed."""
        if self.durable is not None:
            self.durable.commit(step, meta())

    def close(self) -> None:
        """Store what is on its way, and close the files."""
        self._finish_copies()
        if self._file_store is None or self._files is None:
            return
        try:
            if self.durable is not None:
                self.durable.join()
            self._file_store.settle()
        finally:
            self._file_store.close()
            if self.durable is None:
                self._files.remove_folder()

    def _kept_dtypes(self, bank: StateBank) -> Dtypes:
        """Of all that is kept outside the device."""
        states = self._dtypes(bank)
        return states if self._files is None else self._files.with_kept(states, bank)

    def _point_to_current(self) -> None:
        """Let `optimizer.state` and `masters` show the slab, or the file with the newest states."""
        for bank in self._banks:
            for parameter in bank.offsets:
                store = self._file_store
                states = bank.views_of(parameter) if store is None else store.views_of(bank, parameter)
                master = states.pop(MASTER, None)
                weight = states.pop(WEIGHT, master)
                if master is not None:
                    self.masters[parameter] = master
                if weight is not None and bank.has_weights:
                    self.homes[parameter] = weight
                self._state(parameter).update(joined(states))

    # --- a step -------------------------------------------------------------------------------------------------
    def device_tensors(self) -> list[torch.Tensor]:
        """Copies of states that are on the device now."""
        return self._update.chunks_on_device() if isinstance(self._update, DeviceUpdate) else []

    @property
    def delayed_tensors(self) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Device memory of a delayed update: gradients, and buffers that exist between updates too."""
        return (self._late.gradients, self._late.buffers) if self._late is not None else ((), ())

    def _with_gradients(self) -> Iterator[ChunkUpdate]:
        """The chunks of a step, and one count of it for each parameter."""
        for parameter in (one for group in self._optimizer.param_groups for one in group["params"]):
            if parameter.grad is not None and local(parameter).numel() == 0 and "step" in self._state(parameter):
                self._state(parameter)["step"] += 1
        for chunk in self._chunks:
            pieces = [piece for piece in chunk.pieces if piece.parameter.grad is not None]
            if pieces or self.durable is not None:  # the file of this step needs the other chunks too
                counters = [self._counter(piece.parameter, is_last=piece.is_last) for piece in pieces]
                yield ChunkUpdate(chunk=chunk, pieces=pieces, counters=counters)

    def _counter(self, parameter: nn.Parameter, *, is_last: bool) -> State:
        """The kernel adds 1 to the counter that it gets: copies for all pieces of a parameter but the last."""
        state = self._state(parameter)
        if "step" not in state:
            return {}
        return {"step": state["step"] if is_last else state["step"].clone()}

    def _state(self, parameter: nn.Parameter) -> State:
        return self._optimizer.state[parameter]  # type: ignore[no-any-return]

    def _require_no_new_groups(self) -> None:
        """A group that was added later has no states here, and would keep its values without a word."""
        if len(self._optimizer.param_groups) != self._num_groups:
            raise NotBuiltError(
                "a parameter group was added to an optimizer whose states are offloaded",
                hint="give the optimizer all groups when it is built, or set offload.optimizer = 'none'",
            )

    @contextmanager
    def _reported(self) -> Iterator[None]:
        if self.on_step is not None:
            self.on_step(True)
        yield
        if self.on_step is not None:
            self.on_step(False)

    # --- masters ------------------------------------------------------------------------------------------------

    def fill(self, model: nn.Module, layout: ModelLayout, source: WeightSource, *, shards: LocalShards) -> None:
        """Give weights and masters their first values; trained ones that were restored from files have theirs."""

        def store(parameter: nn.Parameter, write: Callable[[torch.Tensor], None]) -> None:
            if self.restored is None or not parameter.requires_grad:
                self.store_weight(parameter, write)

        fill_parameters(model, layout, source, shards=shards, store=store)
        if self.restored is None:
            self.after_load()

    @torch.no_grad()
    def store_weight(self, parameter: nn.Parameter, write: Callable[[torch.Tensor], None]) -> None:
        """Set a weight and its master by `write`, which fills a tensor of the local shard's shape."""
        rest, master = self._at_rest(parameter), self.masters.get(parameter)
        write(rest if master is None else master)
        if master is not None and rest is not master:
            rest.copy_(master)
        self._weights_changed()

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Set weights to their masters, which were loaded."""
        for parameter, master in self.masters.items():
            rest = self._at_rest(parameter)
            if rest is not master:
                rest.copy_(master)
        self._weights_changed()

    def _at_rest(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.homes.get(parameter, local(parameter.detach()))

    def _weights_changed(self) -> None:
        if self.weights is not None:
            self.weights.drop()
            self.weights.begin_after(self._streams.stores)

    # --- memory -------------------------------------------------------------------------------------------------

    def _state_bytes(self) -> int:
        return sum(
            slab_bytes(bank.num_entries(key, bank.num_elements), dtype)
            for bank in self._banks
            for key, dtype in self._dtypes(bank).items()
        )

    def _dtypes(self, bank: StateBank) -> dict[str, torch.dtype]:
        """Of the states by key."""
        masters = {MASTER: self._master_dtype} if self._master_dtype is not None else {}
        is_rounded = self._weight_dtype not in (None, self._master_dtype)
        weights = {WEIGHT: self._weight_dtype} if is_rounded and self._weight_dtype else {}
        return {**masters, **weights, **state_dtypes(self._optimizer, bank)}

    def _create_states(self, device: torch.device) -> None:
        """States of zero for every parameter, as views of the slab; counters on `device`."""
        for bank in self._banks:
            bank.states = {key: self._flat(bank, key, dtype) for key, dtype in self._dtypes(bank).items()}
            for parameter in bank.offsets:
                self._optimizer.state[parameter] = new_counter(self._optimizer, bank.group, device)
        self._point_to_current()

    def _flat(self, bank: StateBank, key: str, dtype: torch.dtype) -> torch.Tensor:
        count = bank.num_entries(key, bank.num_elements)
        if self._file_store is not None:
            return self._file_store.mapped(bank, key, begin=0, count=count)
        return self._slab.take(count, dtype)
