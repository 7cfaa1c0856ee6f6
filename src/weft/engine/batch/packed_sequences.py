"""Rows of a batch without positions are one document each: said to the model, which would read it off the device.

Hugging Face looks for packed documents in the positions of every training forward, and waits for the GPU to know
whether there are any: nothing is queued while it waits, and the GPU is idle for as long as it then takes to fill the
queue again (9 ms of a 250 ms step of a 1.5 B model on an H200).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_MODULE, _NAME = "transformers.masking_utils", "find_packed_sequence_indices"  # a test fails when it moves


@contextmanager
def skip_packed_sequence_check(batch: Mapping[str, Any]) -> Iterator[None]:
    """Inside, a forward over `batch` does not look for documents where it has no positions that could tell any."""
    masks = sys.modules.get(_MODULE)  # not there: no Hugging Face model is
    looking = getattr(masks, _NAME, None)
    if looking is None or "position_ids" in batch:
        yield
        return
    setattr(masks, _NAME, _finds_none)
    try:
        yield
    finally:
        setattr(masks, _NAME, looking)


def _finds_none(_positions: Any) -> None:
    return None
