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

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.core.errors import NotBuiltError
from weft.core.masters import has_masters_away, resting_dtype
from weft.core.open_choices import update_place
from weft.core.plan import Plan
from weft.core.state_folder import StateFolder
from weft.engine.dp.strategy import Strategy
from weft.engine.offload import ahead
from weft.engine.offload.ahead import AheadOfUpdate
from weft.engine.offload.chunk_kernel import State, require_known
from weft.engine.offload.copy_streams import streams_for
from weft.engine.offload.state_files import StateFiles
from weft.engine.offload.state_memory import StateMemory
from weft.engine.offload.update_form import UpdateForm
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate
from weft.engine.offload.weights import OffloadedWeights
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
        kernel = form.kernel_of(optimizer)
        self.memory = memory = StateMemory(
            optimizer, form=form, unit_of=kernel.unit_of, device=device, chunk_elements=chunk_elements,
            masters=masters, weights=weights, frozen=frozen, files=files,
        )  # fmt: skip
        self.masters, self.homes = memory.masters, memory.homes
        self._optimizer = optimizer
        self.place = form.place
        self.weights: OffloadedWeights | None = None
        self._num_groups = len(optimizer.param_groups)
        self._streams = streams_for(device)
        self._update, self._late = form.build(
            kernel, self._streams, store=memory.store, slab=memory.slab, banks=memory.banks, chunks=memory.chunks,
            slot_bytes=memory.slot_bytes, device=device,
        )  # fmt: skip
        memory.restore(device)
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
        self.memory.updated()
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
        self.memory.wait()

    def close(self) -> None:
        """Store what is on its way, and close the files."""
        self._finish_copies()
        self.memory.close()

    def _finish_copies(self) -> None:
        if self._late is not None:
            self._late.land()
        if isinstance(self._update, DeviceUpdate):
            self._update.forget()
            self._update.release(keep_bytes=0)
        self._streams.wait()

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
        for chunk in self.memory.chunks:
            pieces = [piece for piece in chunk.pieces if piece.parameter.grad is not None]
            if pieces or self.memory.durable is not None:  # the file of this step needs the other chunks too
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
            if self.memory.restored is None or not parameter.requires_grad:
                self.store_weight(parameter, write)

        fill_parameters(model, layout, source, shards=shards, store=store)
        if self.memory.restored is None:
            self.memory.after_load()

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
