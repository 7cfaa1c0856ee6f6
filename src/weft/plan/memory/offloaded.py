"""Bytes that offload keeps in host memory and in files, term by term, and its buffers on the device, for every plan.

| term        | host memory                                    | files (`offload.optimizer = "nvme"`) |
| ----------- | ---------------------------------------------- | ------------------------------------ |
| masters     | optimizer = "cpu", where they leave the device | the same                             |
| moments     | optimizer = "cpu"                              | the same                             |
| staging     | chunks in flight: of gradients, of file states |                                      |
| gradients   | of the step before, if the host updates late   |                                      |
| weights     | parameters = "cpu", as they rest               |                                      |
| activations | inputs of recomputed blocks, all in flight;    |                                      |
|             | saved tensors of `activations.offload_blocks`  |                                      |

Weights that rest in the master dtype are their own masters. All ranks of a node share its memory; of a pipeline the
rank with the most bytes counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.offload_sizes import SLOTS
from weft.plan.columns import HOMES, NVME, Bools, Floats
from weft.plan.memory.saved_activations import saved_blocks
from weft.plan.time.state_stream import (
    chunk_bytes,
    held_elements,
    keeps_masters,
    rest_bytes,
    rests_in_compute,
    updates_on_host,
)
from weft.plan.view import View

HostTerms = dict[str, Floats]


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """Bytes per rank outside the device, of the rank with the most."""

    host: HostTerms
    disk: HostTerms
    ranks_per_node: int

    @property
    def host_per_rank(self) -> Floats:
        return _sum(self.host)

    @property
    def host_per_node(self) -> Floats:
        return self.host_per_rank * self.ranks_per_node

    @property
    def disk_per_rank(self) -> Floats:
        return _sum(self.disk)


def offloaded_bytes(views: Sequence[View]) -> Offloaded:
    """Offloaded bytes of each plan's fullest rank."""
    host, disk = _host_terms(views[0]), _disk_terms(views[0])
    for view in views[1:]:
        _keep_larger(host, view, _host_terms(view))
        _keep_larger(disk, view, _disk_terms(view))
    return Offloaded(host=host, disk=disk, ranks_per_node=views[0].request.cluster.devices_per_node)


def staged_weights(view: View, unit_elements: Floats) -> Floats:
    """Shards of a unit on their way from the host, before it is gathered. ZeRO-1 and 2 gather in the first forward."""
    is_staged = (view.columns.offload_parameters > 0) & (view.columns.zero == 3)
    return np.where(is_staged, unit_elements / view.columns.shards * rest_bytes(view), 0.0)


def staged_states(view: View) -> Floats:
    """Chunks on the device during an update: states and masters that are updated there, with rounded weights that leave
    for the host, or weights that return from the host and are cast."""
    sizes = view.sizes
    returned = np.where(rests_in_compute(view) & (view.columns.offload_parameters == 0), sizes.master, 0.0)
    return _in_flight(view) * np.where(updates_on_host(view), returned, chunk_bytes(view))


def updates_beside_compute(view: View) -> Bools:
    """Whether the device makes a delayed update: beside the next step, with chunks that exist throughout."""
    return (view.columns.offload_optimizer > 0) & (view.columns.delayed_update > 0) & ~updates_on_host(view)


def delayed_chunks(view: View) -> Floats:
    """Chunks of states of such an update, and one chunk of new weights."""
    fresh = np.minimum(view.columns.chunk_elements, held_elements(view)) * view.sizes.master
    return np.where(updates_beside_compute(view), staged_states(view) + fresh, 0.0)


def _in_flight(view: View) -> Floats:
    """Elements of the chunks in flight; a small shard has fewer."""
    return np.minimum(SLOTS * view.columns.chunk_elements, held_elements(view))


def _host_terms(view: View) -> HostTerms:
    columns, sizes, held = view.columns, view.sizes, held_elements(view)
    nothing = np.zeros(len(columns))
    is_here, on_host = columns.offload_optimizer == HOMES.index("cpu"), updates_on_host(view)
    from_disk = np.where(columns.offload_optimizer == NVME, sizes.optimizer + _filed_bytes(view), 0.0)
    is_late = on_host & (columns.delayed_update > 0)
    brought = np.where(is_late, 0.0, sizes.gradient) + np.where(keeps_masters(view), sizes.master, 0.0)
    slots = SLOTS * np.minimum(columns.chunk_elements, held)  # of a small shard too
    staged = _in_flight(view) * from_disk + slots * np.where(on_host, brought, 0.0)
    away = nothing
    if np.any(columns.offload_activations):
        blocks = saved_blocks(view)
        away = blocks.away * view.stage.in_flight + blocks.tensors_away
    return {
        "masters": np.where(is_here, held * _master_bytes(view), 0.0),
        "moments": np.where(is_here, held * sizes.optimizer, 0.0),
        "staging": np.where(columns.offload_optimizer > 0, staged, 0.0),
        "gradients": np.where(is_late, held * sizes.gradient, 0.0),
        "weights": np.where(columns.offload_parameters > 0, held * rest_bytes(view), 0.0),
        "activations": away,
    }


def _disk_terms(view: View) -> HostTerms:
    """States in files; a state that survives every step is written to two files in turn."""
    columns, held = view.columns, held_elements(view)
    copies = np.where(columns.offload_optimizer == NVME, np.where(columns.durable_steps > 0, 2.0, 1.0), 0.0)
    return {"masters": copies * held * _filed_bytes(view), "moments": copies * held * view.sizes.optimizer}


def _master_bytes(view: View) -> Floats:
    return np.where(rests_in_compute(view), float(view.sizes.master), 0.0)


def _filed_bytes(view: View) -> Floats:
    """Masters in files: those that are states, or weights that a restart after every step needs."""
    return np.where(view.columns.durable_steps > 0, float(view.sizes.master), _master_bytes(view))


def _keep_larger(terms: HostTerms, view: View, other: HostTerms) -> None:
    """Replace these rows of `terms` where the rank of `view` has more."""
    larger = _sum(other) > _sum(terms)[view.rows]
    for name, values in terms.items():
        values[view.rows[larger]] = other[name][larger]


def _sum(terms: HostTerms) -> Floats:
    values = list(terms.values())
    return np.asarray(sum(values[1:], start=values[0]), dtype=np.float64)
