"""A record's words: key (2) | last_seen | count | values | state, padded to an even number of 4-byte words.

The top bit of the count's word says that a slot is live. A free slot's key is the number of the next free slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LAST_SEEN, COUNT, VALUES = 2, 3, 4
LIVE = np.uint32(1 << 31)
MAX_COUNT = np.uint32((1 << 31) - 1)
META_WORDS = 4
META_DTYPE = np.dtype([("key", np.int64), ("last_seen", np.uint32), ("count", np.uint32)])
INIT_KINDS: tuple[str, ...] = ("zeros", "uniform", "normal")


class Layout(NamedTuple):
    """What a kernel must know of a record. All numbers, so that one compiled kernel serves every table."""

    dim: int
    state_width: int
    accumulator_start: int  # first column of the state that begins at `accumulator`; those before it begin at 0
    accumulator: float
    init_kind: int
    init_scale: float
    init_seed: int
