"""Update of offloaded optimizer states: bytes per parameter on each way, and seconds, for every plan.

| update | to the device               | from the device     | computes         |
| ------ | --------------------------- | ------------------- | ---------------- |
| device | states                      | states              | the device       |
| host   | weights in the master dtype | weights, gradients  | the host's cores |
| files  | the same and masters, and the disk reads and writes both            |

Chunks stream: copies in, copies out, update and disk work on different chunks at once, so the slowest of them sets the
pace and the first chunk's copy comes before it:

    update = max(in, out, update, host memory, disk) + first chunk

Masters stay on the device as the weights' shards, unless `core.masters` says that they leave: then a master that is
wider than the compute dtype moves with the states. Weights that rest on the host (`offload.parameters`) return
there after an update on the device, and need no copy after one on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.masters import masters_leave
from weft.plan.columns import HOMES, NVME, UPDATES, Bools, Floats
from weft.plan.view import View

UPDATE_PASSES = 1.15  # norm and clipping read the gradients once more
ADAMW_BYTES = 28  # of host memory per parameter: weights, moments read and written, gradients read
CORE_CROWDING = 0.082  # each further core slows the others: 0.78 G parameters/s on one, 5.6 on 16 (H200 host)
DEVICE_PIPELINE = 0.96  # measured: 6.0 of 6.25 G parameters/s, moments streamed at 50 GB/s each way (H200)
EQUAL = 0.05  # difference of seconds that decides nothing
HOST_PIPELINE = 0.53  # measured: 2.95 of 5.6 G parameters/s with gradients out and weights back (H200, 16 cores)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter of a rank's optimizer step under offload."""

    into: Floats  # to the device
    out: Floats  # from the device
    in_files: Floats  # read and written


def rests_in_compute(view: View) -> Bools:
    """Whether weights rest in the compute dtype because their masters are with the offloaded states."""
    columns, sizes = view.columns, view.sizes
    return np.asarray(
        masters_leave(
            has_offloaded_states=columns.offload_optimizer > 0,
            are_in_files=columns.offload_optimizer == NVME,
            weights_leave=columns.offload_parameters > 0,
            is_asked=columns.offload_masters > 0,
            is_wider=sizes.master > sizes.compute,
        ),
        dtype=bool,
    )


def keeps_masters(view: View) -> Bools:
    """Whether the weights on the device are the masters of offloaded states."""
    is_here = (view.columns.offload_optimizer > 0) & (view.columns.offload_parameters == 0)
    return is_here & ~rests_in_compute(view)


def rest_bytes(view: View) -> Floats:
    """Bytes per parameter of the weights at rest."""
    return np.where(rests_in_compute(view), float(view.sizes.compute), float(view.sizes.master))


def held_elements(view: View) -> Floats:
    """Parameters whose states the rank updates."""
    return np.where(view.columns.zero > 0, view.trained.total.shard, view.trained.total.unsharded)


def streamed_bytes(view: View) -> Floats:
    """Bytes per parameter of the states that stream through the device: moments, and masters that are not there."""
    is_away = rests_in_compute(view) | (view.columns.offload_parameters > 0)
    return np.asarray(view.sizes.optimizer + np.where(is_away, view.sizes.master, 0), dtype=np.float64)


def chunk_bytes(view: View) -> Floats:
    """Bytes per parameter of a chunk on the device: states, and rounded weights that leave for the host."""
    leave = rests_in_compute(view) & (view.columns.offload_parameters > 0)
    return np.asarray(streamed_bytes(view) + np.where(leave, view.sizes.compute, 0), dtype=np.float64)


def updates_on_host(view: View) -> Bools:
    """Plans whose host updates the offloaded states: as asked, or because it is faster.

    Of equally fast places the device: its update has the bits of a run without offload.
    """
    columns = view.columns
    if not np.any(columns.offload_optimizer):
        return np.zeros(len(columns), dtype=bool)
    is_auto = columns.offload_update == UPDATES.index("auto")
    is_faster = _stage_seconds(view, on_host=True) < (1 - EQUAL) * _stage_seconds(view, on_host=False)
    chosen = np.where(is_auto, is_faster | view.request.is_cpu, columns.offload_update == UPDATES.index("host"))
    return (columns.offload_optimizer > 0) & chosen


def state_bytes(view: View, *, on_host: bool) -> StateBytes:
    """Bytes per parameter, if the host updates or if the device does."""
    columns, sizes = view.columns, view.sizes
    master = np.where(rests_in_compute(view), sizes.master, 0)
    states = streamed_bytes(view)
    is_away = columns.offload_parameters > 0
    if on_host:
        into = np.where(is_away, 0.0, sizes.master)
        out = sizes.gradient + np.where(keeps_masters(view), sizes.master, 0.0)
    else:
        into, out = states, chunk_bytes(view)
    in_files = sizes.optimizer + master
    return StateBytes(into=into, out=out, in_files=np.where(columns.offload_optimizer == NVME, in_files, 0.0))


def update_seconds(view: View, *, on_host: bool) -> Floats:
    """Seconds of the update of a rank's states, all ranks of the node at once."""
    held, moved, cluster = held_elements(view), state_bytes(view, on_host=on_host), view.request.cluster
    before = (moved.out if on_host else moved.into) / cluster.host.bytes_per_s + moved.in_files / _disk_rate(view)
    steady = held * _stage_seconds(view, on_host=on_host)
    return np.asarray(steady + np.minimum(view.columns.chunk_elements, held) * before, dtype=np.float64)


def landing_seconds(view: View) -> Floats:
    """Seconds per parameter between two steps of a delayed update: new weights land; a host gets the gradients."""
    device, sizes = view.request.cluster.device, view.sizes
    copied = 2 * sizes.master / (device.memory_bytes_per_s * device.memory_share)
    weights, gradients = np.full((2, len(view.columns)), [[sizes.master], [sizes.gradient]], dtype=np.float64)
    passed = np.maximum(weights, gradients) / link_rate(view, weights, gradients)
    return np.where(updates_on_host(view), passed, copied)


def _disk_rate(view: View) -> float:
    """Bytes per second of a rank's share of its node's disks."""
    cluster = view.request.cluster
    return max(cluster.nvme_bytes_per_s, 1.0) / cluster.devices_per_node


def _stage_seconds(view: View, *, on_host: bool) -> Floats:
    """Seconds per parameter of the slowest stage."""
    moved = state_bytes(view, on_host=on_host)
    cluster, num_ranks = view.request.cluster, view.request.cluster.devices_per_node
    rate = link_rate(view, moved.into, moved.out)
    passed = np.maximum(moved.into, moved.out) / rate / (1.0 if on_host else DEVICE_PIPELINE)
    in_memory = (moved.into + moved.out + 2 * moved.in_files) * num_ranks / cluster.host_memory_bytes_per_s
    on_disk = 2 * moved.in_files / _disk_rate(view)
    if on_host:
        touched = in_memory + _update_bytes(view) * num_ranks / cluster.host_memory_bytes_per_s
        computed = np.maximum(1 / host_update_rate(view), touched)
    else:
        computed = np.full(len(passed), _device_seconds(view))
    return np.maximum.reduce([passed, in_memory, on_disk, computed])


def update_share(view: View) -> Floats:
    """Share of a device update's seconds in which the device computes."""
    return _device_seconds(view) / _stage_seconds(view, on_host=False)


def _device_seconds(view: View) -> float:
    """Seconds per parameter of the update itself, on the device."""
    device = view.request.cluster.device
    return UPDATE_PASSES * _update_bytes(view) / (device.memory_bytes_per_s * device.memory_share)


def hides_copies(view: View) -> Bools:
    """Whether states of a device update come and go beside the blocks (engine/offload/ahead.py)."""
    in_memory = view.columns.offload_optimizer == HOMES.index("cpu")
    is_exact = in_memory & (view.columns.delayed_update == 0)
    return is_exact & ~updates_on_host(view) & (view.columns.pp == 1) & (not view.request.is_cpu)


def link_rate(view: View, into: Floats, out: Floats) -> Floats:
    """Bytes per second of the host link in each direction; less if both are in use."""
    host = view.request.cluster.host
    return np.where((into > 0) & (out > 0), host.bytes_per_s * host.duplex_share, host.bytes_per_s)


def host_update_rate(view: View) -> float:
    """Parameters per second of a rank's cores, copies around the update included; scaled by its bytes from AdamW's."""
    cluster = view.request.cluster
    cores = cluster.host_cores_per_device
    alone = cluster.host_core_parameters_per_s * cores / (1 + CORE_CROWDING * max(cores - 1, 0.0))
    return HOST_PIPELINE * alone * ADAMW_BYTES / max(_update_bytes(view), 1.0)


def _update_bytes(view: View) -> float:
    """Bytes per parameter that an update reads and writes."""
    sizes = view.sizes
    return 2 * sizes.master + sizes.gradient + 2 * sizes.optimizer
