"""`OffloadedStates`: an optimizer's moments in the host's memory, and the step that updates them.

    kept on the device   weights (float32 shards, which are the masters), gradients
    kept on the host     moments, in one slab; `optimizer.state` holds views of it, so checkpoints need no other code

A step is one pass over the chunks after the gradient norm is known: clipping has the bits of a step without offload,
and a step that float16 skips never begins. A delayed step (`delayed.py`) ends after the next step's gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.optim import Optimizer

from weft.core import offload_sizes
from weft.core.errors import NotBuiltError
from weft.core.open_choices import update_place
from weft.core.plan import Plan
from weft.engine.dp.strategy import Strategy
from weft.engine.offload.ahead import AheadOfUpdate
from weft.engine.offload.chunk_kernel import ChunkKernel, State, block_of, new_counter, require_known, state_dtypes
from weft.engine.offload.chunks import StateBank, divide
from weft.engine.offload.copy_streams import streams_for
from weft.engine.offload.delayed import DelayedOnDevice, DelayedOnHost, IntoGradients, pending_bytes, weight_bytes
from weft.engine.offload.host_room import require_room
from weft.engine.offload.slab import HostSlab, slab_bytes
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate, HostUpdate, staging_bytes
from weft.engine.optim.adamw_8bit import joined
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.ownership import local
from weft.models.layout import ModelLayout


def offload_states(
    optimizer: Optimizer,
    plan: Plan,
    model: nn.Module,
    layout: ModelLayout,
    strategy: Strategy,
    *,
    device: torch.device,
) -> OffloadedStates | None:
    """Move the optimizer's states to the host if the plan says so. Collective."""
    place = update_place(plan, device_type=device.type)
    if place is None:
        return None
    is_delayed = plan.offload.delayed
    found = OffloadedStates(
        optimizer, place=place, device=device, is_delayed=is_delayed, buckets=strategy.gradient_buckets
    )
    if (
        device.type == "cuda" and plan.mesh.pp == 1 and not is_delayed
    ):  # a pipeline's backwards do not free activations block by block
        found.hide_behind(
            [model.get_submodule(name) for name in layout.blocks],
            num_microbatches=plan.pipeline.microbatches,
            staging_bytes=plan.offload.staging_bytes,
            allocated=functools.partial(torch.cuda.memory_allocated, device),
        )
    return found


class OffloadedStates:
    """See the module. `optimizer` keeps groups, constants and state; `step` of this object replaces its own."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        place: Literal["device", "host"],
        device: torch.device,
        is_delayed: bool = False,
        buckets: Callable[[], Sequence[torch.Tensor]] = list,
    ) -> None:
        require_known(optimizer)
        self._optimizer = optimizer
        self.place = place
        self._num_groups = len(optimizer.param_groups)
        kernel = ChunkKernel(optimizer) if place == "host" or not is_delayed else IntoGradients(optimizer)
        self._banks, self._chunks = divide(
            optimizer.param_groups, chunk_elements=offload_sizes.CHUNK_ELEMENTS, unit_of=kernel.unit_of,
            block_of=functools.partial(block_of, optimizer),
        )  # fmt: skip
        num_slots = offload_sizes.SLOTS
        is_late_on_host = is_delayed and place == "host"
        staged = weight_bytes if is_late_on_host else staging_bytes
        staged_bytes = max(map(staged, self._chunks), default=0) if place == "host" else 0
        late_bytes = pending_bytes(self._banks) if is_late_on_host else 0
        self.host_bytes = self._moment_bytes() + num_slots * staged_bytes + late_bytes
        if active_fake_mode() is None:
            require_room(self.host_bytes, device=device)
        self._slab = HostSlab(self.host_bytes, device=device)
        self._create_states(device if place == "device" else torch.device("cpu"))
        self._streams = streams_for(device)
        self._update: DeviceUpdate | HostUpdate | DelayedOnHost
        self._late: DelayedOnDevice | DelayedOnHost | None = None
        if place == "device":
            self._update = DeviceUpdate(
                kernel, self._streams, chunks=self._chunks, device=device, num_slots=num_slots, keeps_slots=is_delayed
            )
            if isinstance(kernel, IntoGradients):
                self._late = DelayedOnDevice(self._update, kernel, chunks=self._chunks, device=device, buckets=buckets)
        else:
            staging = [self._slab.take(staged_bytes, torch.uint8) for _ in range(num_slots)]
            if is_delayed:
                pending = {id(bank): self._slab.take(bank.num_elements, bank.dtype) for bank in self._banks}
                factor = self._slab.take(1, torch.float32)[0]
                self._update = self._late = DelayedOnHost(
                    kernel, self._streams, chunks=self._chunks, pending=pending, staging=staging, factor=factor,
                    device=device,
                )  # fmt: skip
            else:
                self._update = HostUpdate(kernel, self._streams, staging=staging)
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
        if self._late is not None:
            self._late.land()
        if isinstance(self._update, DeviceUpdate):
            self._update.forget()
            self._update.release(keep_bytes=0)
        self._streams.wait()

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
            if pieces:
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

    # --- memory -------------------------------------------------------------------------------------------------

    def _moment_bytes(self) -> int:
        return sum(slab_bytes(count, dtype) for bank in self._banks for _, count, dtype in self._states_of(bank))

    def _states_of(self, bank: StateBank) -> Iterator[tuple[str, int, torch.dtype]]:
        """Name, entries and dtype of each state of a bank."""
        for key, dtype in state_dtypes(self._optimizer, bank).items():
            yield key, bank.num_entries(key, bank.num_elements), dtype

    def _create_states(self, device: torch.device) -> None:
        """States of zero for every parameter, as views of the slab; counters on `device`."""
        for bank in self._banks:
            bank.states = {key: self._slab.take(count, dtype) for key, count, dtype in self._states_of(bank)}
            for parameter in bank.offsets:
                counter = new_counter(self._optimizer, bank.group, device)
                self._optimizer.state[parameter] = {**counter, **joined(bank.views_of(parameter))}
