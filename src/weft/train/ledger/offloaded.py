"""Rows of the ledger for offload: host memory by term, predicted and counted, and the copies of a step as predicted.

    hidden bytes = bytes * (1 - exposed seconds / seconds)

Counted bytes are those of the pools of this rank; `process_peak_bytes` is all that its process ever held in memory, the
interpreter and its libraries included.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

from weft.engine.engine import Engine
from weft.train.ledger.predicted import Prediction
from weft.train.ledger.rows import Row, row


def offload_rows(engine: Engine, prediction: Prediction | None) -> dict[str, Any] | None:
    """None: the plan offloads nothing."""
    counted, record = engine.host_terms(), prediction.estimate.offload if prediction is not None else None
    predicted = record.host_terms if record is not None else {}
    if not counted and not predicted:
        return None
    is_known = record is not None
    return {
        "host": {
            "terms": {name: _row(name, predicted, counted, is_known=is_known) for name in {**predicted, **counted}},
            "total": row(predicted=sum(predicted.values()) if is_known else None, measured=sum(counted.values())),
            "process_peak_bytes": process_peak_bytes(),
        },
        "transfers": [_with_hidden(one) for one in record.transfers] if record is not None else [],
    }


def process_peak_bytes() -> int:
    """The peak of this process's resident memory."""
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _row(name: str, predicted: dict[str, int], counted: dict[str, int], *, is_known: bool) -> Row:
    return row(predicted=predicted.get(name, 0) if is_known else None, measured=counted.get(name, 0))


def _with_hidden(copied: dict[str, Any]) -> dict[str, Any]:
    moved = copied["in_bytes"] + copied["out_bytes"]
    exposed = round(moved * copied["exposed_s"] / copied["seconds"]) if copied["seconds"] else 0
    return {**copied, "hidden_bytes": moved - exposed, "exposed_bytes": exposed}
