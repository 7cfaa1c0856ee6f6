"""Copies between device and host per step: bytes each way, seconds, and seconds that compute does not hide.

forward    weights in (`offload.parameters`), inputs of recomputed blocks and saved tensors of others out
           (`activations.offload`)
backward   weights in again (ZeRO-3, or no ZeRO), inputs in, one block ahead
update     optimizer states, see state_stream.py

Weights are copied before every gather: the rank's shard, for every micro-batch in ZeRO-3 and without ZeRO, once per
step in ZeRO-1 and 2. They hide behind the whole phase except the first unit; an input hides behind its own block. Of an
update on the device the copies hide behind the blocks, as far as there is memory for chunks that come early and leave
late (plan/memory/staging.py). A delayed update hides behind the next step's compute, except for its end: new weights
replace those of the model, and gradients leave for the host if it updates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.columns import Floats
from weft.plan.memory.saved_activations import saved_blocks
from weft.plan.memory.staging import chunks_within
from weft.plan.time.compute import BlockSeconds
from weft.plan.time.state_stream import (
    held_elements,
    hides_copies,
    landing_seconds,
    link_rate,
    rest_bytes,
    state_bytes,
    streamed_bytes,
    update_seconds,
    update_share,
    updates_on_host,
)
from weft.plan.view import View

OVERLAP = 0.9  # share of compute that hides communication: both need memory bandwidth and SMs


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Copies of one phase of a step, per rank."""

    into_bytes: Floats  # to the device
    out_bytes: Floats  # from the device
    seconds: Floats
    exposed_s: Floats


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """All copies of a step."""

    forward: Transfer
    backward: Transfer
    update: Transfer
    file_bytes: Floats  # read in the update, and as many written


def transfers_of(view: View, busy: BlockSeconds) -> Transfers:
    """Copies of the rank of `view`, which computes for `busy`."""
    columns = view.columns
    nothing = np.zeros(len(columns))
    none = Transfer(into_bytes=nothing, out_bytes=nothing, seconds=nothing, exposed_s=nothing)
    forward, backward, update, file_bytes = none, none, none, nothing
    if np.any(columns.offload_parameters) or np.any(columns.offload_activations):
        forward, backward = _phases(view, busy)
    if np.any(columns.offload_optimizer) or np.any(columns.offload_parameters):
        update, file_bytes = _update(view, busy)
    return Transfers(forward=forward, backward=backward, update=update, file_bytes=file_bytes)


def _phases(view: View, busy: BlockSeconds) -> tuple[Transfer, Transfer]:
    """(forward, backward)."""
    columns, stage = view.columns, view.stage
    m = columns.microbatches.astype(np.float64)
    is_once = (columns.zero == 1) | (columns.zero == 2)
    weights = np.where(columns.offload_parameters > 0, held_elements(view) * rest_bytes(view), 0.0)
    blocks = saved_blocks(view)
    inputs = (blocks.away + blocks.tensors_away) * m
    units = stage.blocks.sum(axis=1) + (stage.holds_embedding | stage.holds_head)
    first = weights / np.maximum(units, 1.0) / view.request.cluster.host.bytes_per_s
    recomputed = stage.recomputed.num_full / np.maximum(stage.blocks.sum(axis=1), 1.0)
    recomputed = np.where(blocks.tensors_away > 0, 1.0, recomputed)  # spread over all blocks
    in_forward = recomputed * (busy.forward - busy.head_forward)
    in_backward = recomputed * (busy.backward - 2 * busy.head_forward - busy.recompute) + busy.recompute
    has_weights = columns.offload_parameters > 0
    fetched, again = weights * np.where(is_once, 1.0, m), weights * np.where(is_once, 0.0, m)

    rate = link_rate(view, fetched, inputs)
    exposed = np.maximum(fetched / rate - OVERLAP * np.where(is_once, 1.0, m) * busy.forward, 0.0) + first
    behind = np.maximum(inputs / rate - OVERLAP * m * in_forward, 0.0)
    seconds = np.maximum(fetched, inputs) / rate
    exposed = np.minimum(np.maximum(exposed, behind), seconds)
    forward = Transfer(into_bytes=fetched, out_bytes=inputs, seconds=seconds, exposed_s=exposed)
    seconds = (again + inputs) / view.request.cluster.host.bytes_per_s
    beside = OVERLAP * m * np.where(has_weights & ~is_once, busy.backward, in_backward)
    exposed = np.maximum(seconds - beside, 0.0) + np.where(is_once, 0.0, first)
    backward = Transfer(
        into_bytes=again + inputs,
        out_bytes=np.zeros(len(columns)),
        seconds=seconds,
        exposed_s=np.minimum(exposed, seconds),
    )
    return forward, backward


def _beside_blocks(view: View, busy: BlockSeconds) -> Floats:
    """Share of a device update's copies that hide behind the blocks: bytes that there is room for and the link carries.

    Room that activations leave is filled in the last backward and emptied in the first forward, which is shorter; the
    staging is filled in half a step and emptied in half a step."""
    columns, states = view.columns, held_elements(view) * streamed_bytes(view)
    if not np.any(hides_copies(view)):
        return np.zeros(len(columns))
    rate = OVERLAP * link_rate(view, states, states)
    blocks = saved_blocks(view)
    left = np.minimum(np.maximum(blocks.total - blocks.block.none, 0.0), rate * busy.forward)
    half_step = rate * columns.microbatches * (busy.forward + busy.backward) / 2
    moved = np.minimum(left + np.minimum(columns.staging_bytes, half_step), half_step)
    most = 1 - update_share(view)  # the update itself hides behind nothing
    return np.where(hides_copies(view), np.minimum(chunks_within(view, moved) / np.maximum(states, 1.0), most), 0.0)


def _update(view: View, busy: BlockSeconds) -> tuple[Transfer, Floats]:
    """(the update, bytes of files that it reads and writes)."""
    columns, held, on_host = view.columns, held_elements(view), updates_on_host(view)
    is_off = columns.offload_optimizer > 0
    by_host, by_device = (state_bytes(view, on_host=way) for way in (True, False))
    # an optimizer on the device updates weights of the host: they come and go once more
    fetched = np.where(columns.offload_parameters > 0, rest_bytes(view), 0.0)
    into = held * np.where(is_off, np.where(on_host, by_host.into, by_device.into), fetched)
    out = held * np.where(is_off, np.where(on_host, by_host.out, by_device.out), fetched)
    files = held * np.where(on_host, by_host.in_files, by_device.in_files) * is_off
    streamed = np.where(on_host, update_seconds(view, on_host=True), update_seconds(view, on_host=False))
    seconds = np.where(is_off, streamed, np.maximum(into, out) / link_rate(view, into, out))
    compute = columns.microbatches * (busy.forward + busy.backward)
    is_late = is_off & (columns.delayed_update > 0)
    hidden = np.where(is_late, OVERLAP * compute, _beside_blocks(view, busy) * seconds)
    exposed = np.maximum(seconds - hidden, 0.0)
    exposed += np.where(is_late, held * landing_seconds(view), 0.0)
    return Transfer(into_bytes=into, out_bytes=out, seconds=seconds, exposed_s=exposed), files
