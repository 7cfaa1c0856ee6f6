"""Dry runs written by hand, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from weft.core.records import HolderRecord, PeakRecord
from weft.dryrun.record import DryRun

GIB = 2**30
TERMS = {"logits_and_loss": 31 * GIB, "activations": 20 * GIB, "weights": 4 * GIB}


def holder_of(**fields: Any) -> HolderRecord:
    usual: dict[str, Any] = {
        "term": "logits_and_loss",
        "nbytes": 10 * GIB,
        "count": 1,
        "module": "",
        "operator": "aten._log_softmax",
        "phase": "forward",
        "shape": (16384, 32000),
        "dtype": "float32",
    }
    return HolderRecord(**usual | fields)


def found_of(
    *,
    terms: dict[str, int] | None = None,
    traffic_bytes: int = 1000,
    count: int = 5,
    largest: tuple[HolderRecord, ...] = (holder_of(), holder_of(phase="backward")),
    **fields: Any,
) -> DryRun:
    """A rank whose peak is at the loss; `fields` are those of `DryRun`."""
    terms = terms or TERMS
    peak = PeakRecord(
        peak_bytes=sum(terms.values()),
        terms=terms,
        phase="backward",
        module="",
        operator="aten._log_softmax_backward_data",
        largest=largest,
    )
    usual: dict[str, Any] = {
        "rank": 0,
        "world_size": 8,
        "peak": peak,
        "reserved_bytes": {"expandable_segments": 60 * GIB, "fixed_segments": 64 * GIB},
        "moments": {},
        "traffic": [
            {
                "axis": "dp_shard",
                "collective": "all_gather",
                "phase": "forward",
                "bytes": traffic_bytes,
                "count": count,
            }
        ],
        "flops": 28 * 10**12,
        "num_parameters": 8_030_261_248,
        "elapsed_s": 6.5,
    }
    return DryRun(**usual | fields)
