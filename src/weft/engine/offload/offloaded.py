"""`OffloadedStates`: an optimizer's moments in the host's memory, and the step that updates them.

    kept on the device   weights (float32 shards, which are the masters), gradients
    kept on the host     moments, in one slab; `optimizer.state` holds views of it, so checkpoints need no other code

Where `core.masters` says that masters leave the device, weights rest there in the compute dtype, and the float32 master
is one more state in the slab: it is what updates change and what checkpoints hold as the model. With
`offload.parameters = "cpu"` the slab has the weights at rest too, frozen ones among them (`engine/offload/weights.py`);
weights that are not rounded are the masters.

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
from weft.core.masters import has_masters_away, resting_dtype
from weft.core.open_choices import update_place
from weft.core.plan import Plan
from weft.engine.offload.ahead import AheadOfUpdate
from weft.engine.offload.chunk_kernel import ChunkKernel, State, new_counter, require_known, state_dtype, state_keys
from weft.engine.offload.chunks import MASTER, WEIGHT, StateBank, divide
from weft.engine.offload.copy_streams import streams_for
from weft.engine.offload.host_room import require_room
from weft.engine.offload.slab import HostSlab, slab_bytes
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate, HostUpdate, staging_bytes
from weft.engine.offload.weights import OffloadedWeights
from weft.engine.optim.adamw_low import AdamWLow
from weft.engine.ownership import local
from weft.engine.precision import torch_dtype
from weft.models.layout import ModelLayout


def offload_states(
    optimizer: Optimizer, plan: Plan, model: nn.Module, layout: ModelLayout, *, device: torch.device
) -> OffloadedStates | None:
    """Move the optimizer's states to the host if the plan says so. Collective."""
    place = update_place(plan, device_type=device.type)
    if place is None:
        return None
    has_weights = plan.offload.parameters != "none"
    has_masters = has_weights or has_masters_away(plan)
    found = OffloadedStates(
        optimizer,
        place=place,
        device=device,
        masters=torch_dtype(plan.precision.policy().master_weights) if has_masters else None,
        weights=torch_dtype(resting_dtype(plan)) if has_weights else None,
        frozen=[one for one in model.parameters() if not one.requires_grad] if has_weights else (),
    )
    if has_weights:
        found.weights = OffloadedWeights(model, found.homes, device=device)
    if device.type == "cuda" and plan.mesh.pp == 1:  # a pipeline's backwards do not free activations block by block
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
        masters: torch.dtype | None = None,
        weights: torch.dtype | None = None,
        frozen: Sequence[nn.Parameter] = (),
    ) -> None:
        """`masters`: their dtype, if they are states; None: parameters are their own masters. `weights`: the dtype of
        those that rest in host memory, with `frozen` ones; None: they rest on the device."""
        require_known(optimizer)
        self._master_dtype, self._weight_dtype = masters, weights
        self.masters: dict[nn.Parameter, torch.Tensor] = {}  # what checkpoints hold, where parameters do not
        self.homes: dict[nn.Parameter, torch.Tensor] = {}  # weights that rest in host memory
        self.weights: OffloadedWeights | None = None
        self._optimizer = optimizer
        self.place = place
        self._num_groups = len(optimizer.param_groups)
        kernel = ChunkKernel(optimizer)
        self._banks, self._chunks = divide(
            optimizer.param_groups,
            chunk_elements=offload_sizes.CHUNK_ELEMENTS,
            unit_of=kernel.unit_of,
            masters=masters,
            has_weights=weights is not None,
        )
        num_slots = offload_sizes.SLOTS
        staged_bytes = self._staged_bytes() if place == "host" else 0
        frozen_bytes = sum(slab_bytes(local(one).numel(), one.dtype) for one in frozen)
        self.host_bytes = self._state_bytes() + frozen_bytes + num_slots * staged_bytes
        if active_fake_mode() is None:
            require_room(self.host_bytes, device=device)
        self._slab = HostSlab(self.host_bytes, device=device)
        self._create_states(device if place == "device" else torch.device("cpu"))
        for parameter in frozen:
            own = local(parameter.detach())
            home = self._slab.take(own.numel(), own.dtype).view(own.shape)
            self.homes[parameter] = self.masters[parameter] = home
        self._streams = streams_for(device)
        self._update: DeviceUpdate | HostUpdate
        if place == "device":
            self._update = DeviceUpdate(kernel, self._streams, chunks=self._chunks, device=device, num_slots=num_slots)
        else:
            staging = [self._slab.take(staged_bytes, torch.uint8) for _ in range(num_slots)]
            self._update = HostUpdate(kernel, self._streams, staging=staging, device=device)
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
        """Return when the host may read and write the states, and the device holds no copy of them."""
        if isinstance(self._update, DeviceUpdate):
            self._update.forget()
            self._update.release(keep_bytes=0)
        self._streams.wait()

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

    # --- masters ------------------------------------------------------------------------------------------------

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
        sizes = (slab_bytes(bank.num_elements, dtype) for bank in self._banks for dtype in self._dtypes(bank).values())
        return sum(sizes)

    def _staged_bytes(self) -> int:
        has_masters = self._master_dtype is not None
        return max((staging_bytes(chunk, has_masters=has_masters) for chunk in self._chunks), default=0)

    def _dtypes(self, bank: StateBank) -> dict[str, torch.dtype]:
        """Of the states by key."""
        moments = dict.fromkeys(state_keys(self._optimizer, bank.group), state_dtype(self._optimizer, bank.dtype))
        masters = {MASTER: self._master_dtype} if self._master_dtype is not None else {}
        is_rounded = self._weight_dtype not in (None, self._master_dtype)
        return {**masters, **({WEIGHT: self._weight_dtype} if is_rounded and self._weight_dtype else {}), **moments}

    def _create_states(self, device: torch.device) -> None:
        """States of zero for every parameter, as views of the slab; counters on `device`."""
        for bank in self._banks:
            bank.states = {key: self._slab.take(bank.num_elements, dtype) for key, dtype in self._dtypes(bank).items()}
            for parameter in bank.offsets:
                counter = new_counter(self._optimizer, bank.group, device)
                states = bank.views_of(parameter)
                master = states.pop(MASTER, None)
                weight = states.pop(WEIGHT, master)
                if master is not None:
                    self.masters[parameter] = master
                if weight is not None and bank.has_weights:
                    self.homes[parameter] = weight
                self._optimizer.state[parameter] = {**counter, **states}
