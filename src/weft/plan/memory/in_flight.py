"""Saved tensors of micro-batches in flight on a pipeline rank, for every plan. Without a pipeline there is one.

| from      | until  | saved                                                                              |
| --------- | ------ | ---------------------------------------------------------------------------------- |
| F         | B or I | activations of the blocks, input and output of the stage; the loss on the last one |
| I         | W      | inputs of the linears and gradients of their outputs                               |

A schedule that begins with all forwards has no gradients while all micro-batches are in flight, and one micro-batch
less once it has gradients: the larger of the two counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import BlockShape, SavedBytes
from weft.plan.columns import Bools, Floats
from weft.plan.memory.block_activations import bytes_of
from weft.plan.memory.block_tensors import is_key_value
from weft.plan.view import View

LOG_PROBABILITY_BYTES = 4  # saved by the loss per logit


@dataclass(frozen=True, kw_only=True)
class Flight:
    """Micro-batches in flight at the peak, and whether gradients of earlier ones exist then."""

    microbatches: Floats  # in units of all the rank's blocks
    slots: Floats  # in (stage, micro-batch) pairs
    on_last_stage: Floats  # those on the last stage, with their loss; 0 on other ranks
    has_gradients: Bools


def flight_of(view: View, *, one_bytes: Floats, loss_bytes: Floats, gradient_bytes: Floats) -> Flight:
    """Micro-batches in flight; each has `one_bytes` of activations and `loss_bytes` of its loss."""
    columns, stage = view.columns, view.stage
    several = columns.microbatches > 1
    is_full = several & (columns.pp > 1) & (stage.in_flight + stage.waiting >= columns.microbatches)
    is_before = is_full & (one_bytes + loss_bytes > gradient_bytes)
    less = (is_full & ~is_before).astype(np.float64)
    return Flight(
        microbatches=stage.in_flight - less / stage.num_stages,
        slots=stage.slots - less,
        on_last_stage=np.where(stage.holds_head, np.maximum(stage.head_in_flight - less, 1.0), 0.0),
        has_gradients=several & ~is_before,
    )


def edge_bytes(view: View, flight: Flight) -> Floats:
    """Outputs of stages until their gradient arrives, and inputs where the first norm saves its own copy."""
    of_first = np.where(view.stage.holds_embedding, flight.slots / view.stage.num_stages, 0.0)
    outputs = flight.slots - flight.on_last_stage
    inputs = np.where(_saves_own_copy(view), flight.slots - of_first, 0.0)
    return np.where(view.columns.pp > 1, (outputs + inputs) * view.stream_bytes, 0.0)


def _saves_own_copy(view: View) -> bool:
    """Whether the first norm saves its input in float32."""
    norms = [norm for block in view.shape.kinds[:1] for norm in block.norms if norm.place == "residual"]
    return view.sizes.is_mixed and bool(norms) and norms[0].kind == "rms"


def waiting_bytes(view: View) -> Floats:
    """Tensors of blocks whose weight gradients (W) are pending, over all their micro-batches."""
    total = np.zeros(len(view.columns))
    if not np.any(view.stage.waiting):
        return total
    keys = np.zeros(len(view.columns))
    for index, block in enumerate(view.shape.kinds):
        held = _held_for_weights(block, view.sizes.activation, view.shape.hidden_size)
        nbytes = bytes_of(held, block, view.columns, tokens=view.tokens, keys=keys)
        total = total + nbytes * view.stage.blocks[:, index]
    return total * view.stage.waiting


def _held_for_weights(block: BlockShape, c: int, hidden_size: int) -> SavedBytes:
    """Inputs of linears, once where shared, and gradients of their outputs. Fused experts have no separate W."""
    total = SavedBytes()
    inputs: set[tuple[str, int]] = set()
    for linear in block.linears:
        if linear.role == "expert" or linear.is_transposed or not linear.active:
            continue
        out = float(c * linear.out_features)
        if linear.style == "column":
            total = total + (SavedBytes(key_value=out) if is_key_value(linear) else SavedBytes(split=out))
        else:
            total = total + SavedBytes(gathered=out)
        if (linear.role, linear.in_features if linear.style == "row" else 0) not in inputs:
            inputs.add((linear.role, linear.in_features if linear.style == "row" else 0))
            taken = float(c * linear.in_features)
            total = total + (SavedBytes(split=taken) if linear.style == "row" else SavedBytes(gathered=taken))
    return total
