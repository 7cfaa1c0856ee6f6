"""Hashes of the input rows of a model, to compare the samples of ranks with those of one process.

A row is an index of the first dimension of the model's input tensors. Tensors with a gradient are results of another
model, not samples. Positions that an attention mask leaves out are padding, whose length depends on the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

MASK = "attention_mask"


def row_hashes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """One hash per row over all input tensors with the number of rows of the first one."""
    found = [(name, value.detach().cpu()) for name, value in _tensors([*enumerate(args), *kwargs.items()])]
    if not found:
        return []
    num_rows = found[0][1].shape[0]
    mask = next((value for name, value in found if name == MASK and value.ndim == 2), None)
    hashes = []
    for row in range(num_rows):
        digest = hashlib.sha256()
        for _, value in found:
            if value.shape[0] == num_rows:
                digest.update(_bytes(_without_padding(value[row], mask[row] if mask is not None else None)))
        hashes.append(digest.hexdigest()[:16])
    return hashes


def digest_of(tensor: torch.Tensor) -> str:
    """A hash of the tensor's bits."""
    return hashlib.sha256(_bytes(tensor.detach().cpu())).hexdigest()[:16]


def _tensors(items: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, torch.Tensor]]:
    for name, value in items:
        if isinstance(value, torch.Tensor):
            if value.ndim and not value.requires_grad:
                yield name, value
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.items()))
        elif isinstance(value, list | tuple):
            yield from _tensors(list(enumerate(value)))


def _without_padding(row: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None or row.ndim == 0 or row.shape[0] != mask.shape[0]:
        return row
    return row[mask != 0]


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
