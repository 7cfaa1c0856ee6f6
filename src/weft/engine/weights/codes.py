"""Fills a rank's rows of codes of a frozen weight from the source of its values.

Scales are those of the full rows, so that every layout has the same values; a rank that holds a piece of a group
repeats its scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from weft.core.quantised_base import group_of
from weft.core.shards import Chunk, LocalShard, replicated_shard
from weft.engine import ownership
from weft.models.adapter.quantised import RowCodes, pack_rows, quantise_rows
from weft.models.initial import Reader

Write = Callable[[torch.Tensor], None]


def code_writer(parameter: nn.Parameter, shard: LocalShard | None, read: Reader, form: RowCodes) -> Write:
    """Writes this rank's rows of codes of `parameter` into a tensor of their shape."""
    rows = ownership.local_index(parameter)[:-1]
    full = shard or replicated_shard((*parameter.shape[:-1], form.columns), copies=1)
    chunks = full.within((*rows, slice(0, form.columns)))
    full_columns = form.columns if shard is None else shard.shape[-1]
    return functools.partial(_write, chunks, full_columns, read, form)


def _write(chunks: Sequence[Chunk], full_columns: int, read: Reader, form: RowCodes, out: torch.Tensor) -> None:
    codes = torch.zeros(out.shape[0], form.columns, dtype=torch.uint8)
    scales = torch.zeros(out.shape[0], form.columns // form.group, dtype=torch.bfloat16)
    for chunk in chunks:
        if not chunk.num_elements:
            continue
        rows, columns = chunk.global_index
        group = group_of(full_columns)
        full_codes, full_scales = quantise_rows(read((rows, slice(0, full_columns))), form.kind, group)
        repeated = full_scales.repeat_interleave(group // form.group, dim=1)
        own_rows, own_columns = chunk.local_index
        codes[own_rows, own_columns] = full_codes[:, columns].to(codes.device)
        scales[own_rows, _groups(own_columns, form)] = repeated[:, _groups(columns, form)].to(scales.device)
    out.copy_(pack_rows(codes, scales, form))


def _groups(columns: slice, form: RowCodes) -> slice:
    return slice(columns.start // form.group, columns.stop // form.group)
