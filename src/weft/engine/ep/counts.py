"""Counts of rows on the host: the one place where an exchange reads values that the router decides."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.experts import Routing


def read_counts(routing: Routing, **counts: Tensor) -> list[tuple[int, ...]]:
    """`counts` per rank on the host, which waits for the device once.

    Their names are those of `Routing.expected`: a dry run, which has no values, returns these.
    """
    return [tuple(row) for row in torch.stack(list(counts.values())).tolist()]
