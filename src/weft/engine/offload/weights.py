"""`OffloadedWeights`: local shards at rest in the host's memory, on the device only until their unit is gathered.

    at rest       host memory; the shard on the device keeps its shape and has no storage
    gather        the shard arrives, is copied into the gather, and is freed
    meanwhile     the next unit arrives: in a forward the one after, in a backward the one before

At most two units are on their way or waiting. What was loaded and not gathered is dropped when weights change: a gather
would return the weights of the step before. `fully_shard` gathers, also on a single device, with a mesh of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from weft.engine.weights.units import groups_of

MOST_UNITS = 2  # on their way, or waiting for their gather


def free_at_rest(model: nn.Module) -> None:
    """Shards of `model`, sharded a moment ago, have no storage from the moment they are allocated."""
    for group in groups_of(model):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param = _resetting(parameter, parameter.reset_sharded_param)
            if not parameter._sharded_param_data.is_meta:
                _free(parameter._sharded_param_data)


def _resetting(parameter: Any, original: Callable[[], None]) -> Callable[[], None]:
    """`fully_shard` looks at the shard after it was allocated, and once more before the first forward, when a padded
    one would be read and copied."""

    def reset() -> None:
        place = parameter._module_info
        is_new = getattr(place.module, place.param_name) is not parameter.sharded_param
        if is_new or parameter._sharded_param_data.is_meta:
            original()
        if not parameter._sharded_param_data.is_meta:
            _free(parameter._sharded_param_data)

    return reset


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


class _Unit:
    """A unit's shards on the device and at rest; padding behind uneven shards has no values."""

    def __init__(self, group: Any, homes: Mapping[nn.Parameter, torch.Tensor]) -> None:
        self.group = group
        self._shards = [
            (one._sharded_param_data, one._sharded_local_tensor, homes[one.sharded_param]) for one in group.fsdp_params
        ]

    @torch.no_grad()
    def load(self) -> None:
        for padded, shard, home in self._shards:
            padded.untyped_storage().resize_(padded.nbytes)
            shard.copy_(home, non_blocking=True)

    def free(self) -> None:
        for padded, _, _ in self._shards:
            _free(padded)

    @property
    def is_alone(self) -> bool:
        """One rank gathers nothing: its shard is copied when the unit is waited for."""
        return bool(self.group.mesh_info.shard_mesh_size == 1)


class OffloadedWeights:
    """See the module. `homes`: the host memory of every parameter's local shard."""

    def __init__(self, model: nn.Module, homes: Mapping[nn.Parameter, torch.Tensor], *, device: torch.device) -> None:
        self._units = [_Unit(group, homes) for group in groups_of(model) if group.fsdp_params]
        self._streams = _LoadStream(device) if device.type == "cuda" else _NoLoadStream()
        self._waiting: dict[_Unit, Any] = {}  # loaded units and the events of their copies, oldest first
        for place, unit in enumerate(self._units):
            self._attach(place, unit)

    def drop(self) -> None:
        """Weights change: free what was loaded before."""
        for unit in list(self._waiting):
            self._free(unit)

    def begin_after(self, stream: torch.cuda.Stream | None) -> None:
        """Loads that are issued next begin after the copies of `stream` to the host."""
        self._streams.begin_after(stream)

    def _attach(self, place: int, unit: _Unit) -> None:
        group = unit.group
        unshard, wait_for_unshard = group.unshard, group.wait_for_unshard

        def fetch_and_unshard(async_op: bool = False) -> None:
            if unit.is_alone or group._all_gather_result is not None or group.is_unsharded:
                unshard(async_op)
            else:
                self._around(place, unit, self._streams.of_gather(group, async_op), lambda: unshard(async_op))

        def fetch_and_wait() -> None:
            if unit.is_alone and group._all_gather_result is not None:
                self._around(place, unit, self._streams.current(), wait_for_unshard)
            else:
                wait_for_unshard()

        group.unshard, group.wait_for_unshard = fetch_and_unshard, fetch_and_wait

    def _around(self, place: int, unit: _Unit, reader: torch.cuda.Stream | None, gather: Callable[[], None]) -> None:
        """Have the unit's shards on the device while `gather` reads them on the stream `reader`."""
        self._load(unit)
        self._streams.let_wait(reader, self._waiting[unit])
        gather()
        self._streams.begin_after(reader)  # the memory of this unit is that of a later one
        self._free(unit)
        following = self._following(place, is_backward=_is_backward())
        if following is not None:
            self._load(following)

    def _following(self, place: int, *, is_backward: bool) -> _Unit | None:
        """The unit that is gathered after this one, if any. The root, the first, begins forward and backward."""
        root, is_last = self._units[0], place + 1 == len(self._units)
        if is_backward:
            return self._units[place - 1] if place != 1 and len(self._units) > 1 else None
        if not is_last:
            return None if self._units[place + 1].group.is_unsharded else self._units[place + 1]
        # gathered still, but not when the backward begins
        return root if torch.is_grad_enabled() and root.group._reshard_after_forward else None

    def _load(self, unit: _Unit) -> None:
        if unit in self._waiting:
            return
        for oldest in list(self._waiting)[: max(0, len(self._waiting) - MOST_UNITS + 1)]:
            self._free(oldest)
        self._waiting[unit] = self._streams.load(unit.load)

    def _free(self, unit: _Unit) -> None:
        del self._waiting[unit]
        unit.free()


def _is_backward() -> bool:
    # private: no public call tells whether autograd runs
    return bool(torch._C._current_graph_task_id() != -1)


class _NoLoadStream:
    """Of a CPU: a load is done when it returns."""

    def load(self, copy: Callable[[], None]) -> Any:
        copy()

    def current(self) -> torch.cuda.Stream | None:
        return None

    def of_gather(self, group: Any, async_op: bool) -> torch.cuda.Stream | None:
        return None

    def let_wait(self, reader: torch.cuda.Stream | None, event: Any) -> None:
        """The reader continues after a load."""

    def begin_after(self, stream: torch.cuda.Stream | None) -> None:
        """Loads that are issued next begin after the work of `stream` issued so far."""


class _LoadStream(_NoLoadStream):
    """Of a GPU. Memory of shards is allocated on this stream, so that it is reused in the order of loads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self, copy: Callable[[], None]) -> Any:
        with torch.cuda.stream(self._stream):
            copy()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device)

    def of_gather(self, group: Any, async_op: bool) -> torch.cuda.Stream | None:
        if not hasattr(group.comm_ctx, "all_gather_copy_in_stream"):  # before the first forward
            return self.current()
        stream: torch.cuda.Stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
        return stream

    def let_wait(self, reader: torch.cuda.Stream | None, event: Any) -> None:
        if reader is not None:
            reader.wait_event(event)

    def begin_after(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            self._stream.wait_stream(stream)
