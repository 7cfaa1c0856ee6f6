"""`OffloadedStates`: an optimizer's moments in the host's memory, and the step that updates them.

    kept on the device   weights (float32 shards, which are the masters), gradients
    kept on the host     moments, in one slab; `optimizer.state` holds views of it, so checkpoints need no other code

A step is one pass over the chunks after the gradient norm is known: clipping has the bits of a step without offload,
and a step that float16 skips never begins.
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
from weft.engine.offload import ahead
from weft.engine.offload.ahead import AheadOfUpdate
from weft.engine.offload.chunk_kernel import ChunkKernel, State, new_counter, require_known, state_dtype, state_keys
from weft.engine.offload.chunks import StateBank, divide
from weft.engine.offload.copy_streams import streams_for
from weft.engine.offload.host_room import require_room
from weft.engine.offload.slab import HostSlab, slab_bytes
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate, HostUpdate, staging_bytes
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.ownership import local
from weft.models.layout import ModelLayout


def offload_states(
    optimizer: Optimizer, plan: Plan, model: nn.Module, layout: ModelLayout, *, device: torch.device
) -> OffloadedStates | None:
    """Move the optimizer's states to the host if the plan says so. Collective."""
    place = update_place(plan, device_type=device.type)
    if place is None:
        return None
    found = OffloadedStates(optimizer, place=place, device=device, chunk_elements=plan.offload.chunk_elements)
    if (
        ahead.hides_copies(device) and plan.mesh.pp == 1
    ):  # a pipeline's backwards do not free activations block by block
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
        place: Literal["device", "host"],
        device: torch.device,
        chunk_elements: int | None = None,
    ) -> None:
        require_known(optimizer)
        self._optimizer = optimizer
        self.place = place
        self._num_groups = len(optimizer.param_groups)
        kernel = ChunkKernel(optimizer)
        self._banks, self._chunks = divide(
            optimizer.param_groups,
            chunk_elements=chunk_elements or offload_sizes.CHUNK_ELEMENTS,
            unit_of=kernel.unit_of,
        )
        num_slots = offload_sizes.SLOTS
        staged_bytes = max(map(staging_bytes, self._chunks), default=0) if place == "host" else 0
        self.host_bytes = self._moment_bytes() + num_slots * staged_bytes
        if active_fake_mode() is None:
            require_room(self.host_bytes, device=device)
        self._slab = HostSlab(self.host_bytes, device=device)
        self._create_states(device if place == "device" else torch.device("cpu"))
        self._streams = streams_for(device)
        self._update: DeviceUpdate | HostUpdate
        if place == "device":
            self._update = DeviceUpdate(kernel, self._streams, chunks=self._chunks, device=device, num_slots=num_slots)
        else:
            staging = [self._slab.take(staged_bytes, torch.uint8) for _ in range(num_slots)]
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
            self._update.run(list(self._with_gradients()), factor)
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
        """Return when the host may read and write the states, and the device holds no copy of them."""
        if isinstance(self._update, DeviceUpdate):
            self._update.forget()
            self._update.release(keep_bytes=0)
        self._streams.wait()

    def host_terms(self) -> dict[str, int]:
        """Bytes of the host's memory by the planner's terms."""
        terms = {"moments": self._moment_bytes(), "staging": self.host_bytes - self._moment_bytes()}
        return {term: nbytes for term, nbytes in terms.items() if nbytes}

    def device_tensors(self) -> list[torch.Tensor]:
        """Copies of states that are on the device now."""
        return self._update.chunks_on_device() if isinstance(self._update, DeviceUpdate) else []

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
        sizes = (slab_bytes(bank.num_elements, self._dtype(bank)) * len(self._keys(bank)) for bank in self._banks)
        return sum(sizes)

    def _keys(self, bank: StateBank) -> tuple[str, ...]:
        return state_keys(self._optimizer, bank.group)

    def _dtype(self, bank: StateBank) -> torch.dtype:
        return state_dtype(self._optimizer, bank.dtype)

    def _create_states(self, device: torch.device) -> None:
        """States of zero for every parameter, as views of the slab; counters on `device`."""
        for bank in self._banks:
            bank.states = {key: self._slab.take(bank.num_elements, self._dtype(bank)) for key in self._keys(bank)}
            for parameter in bank.offsets:
                counter = new_counter(self._optimizer, bank.group, device)
                self._optimizer.state[parameter] = {**counter, **bank.views_of(parameter)}
