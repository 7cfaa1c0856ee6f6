"""Rows of a batch: their number, the rows of a rank, micro-batches, and the copy to the device."""

from __future__ import annotations

import torch

from weft.core.errors import BatchError
from weft.engine.objective import Batch


def num_rows(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


def share_of_rows(batch: Batch, *, rank: int, degree: int) -> dict[str, torch.Tensor]:
    """The rows of one of `degree` data-parallel ranks."""
    rows = num_rows(batch)
    if rows % degree:
        raise BatchError(
            f"{rows} rows do not divide over {degree} data-parallel ranks",
            hint=f"use {rows // degree * degree or degree} or {-(-rows // degree) * degree} rows",
        )
    begin = rank * (rows // degree)
    return {key: value[begin : begin + rows // degree] for key, value in batch.items()}


def split_rows(batch: Batch, count: int, *, must_be_equal: bool) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of equal size; the first ones have one row more if the rows do not divide."""
    rows = num_rows(batch)
    if rows < count or (rows % count and must_be_equal):
        raise BatchError(
            f"this rank's {rows} rows do not divide into {count} micro-batches",
            hint=f"choose pipeline.microbatches among the divisors of {rows}, or another train.global_batch",
        )
    pieces = {key: torch.tensor_split(value, count) for key, value in batch.items()}
    return [{key: pieces[key][index] for key in pieces} for index in range(count)]


def to_device(batch: Batch, device: torch.device) -> dict[str, torch.Tensor]:
    """A non-blocking copy: out of memory that is not pinned, it would wait for all queued work of the GPU."""
    if device.type == "cuda":
        batch = {key: value if value.is_cuda else value.pin_memory() for key, value in batch.items()}
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
