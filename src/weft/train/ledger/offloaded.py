"""Rows of the ledger for offload: host memory by term, predicted and counted, and the copies of a step as predicted.

    hidden bytes = bytes * (1 - exposed seconds / seconds)

Counted bytes are those of the pools of this rank; `process_peak_bytes` is all that its process ever held in memory, the
interpreter and its libraries included.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

from weft.checkpoint.memory_copies import MemoryCopies
from weft.core.terms import MemoryTerm
from weft.engine.engine import Engine
from weft.train.ledger.predicted import Prediction
from weft.train.ledger.rows import Row, row, total_row

COPIES = "copies"  # of the state, for a restart (checkpoint.memory_every)


def offload_rows(
    engine: Engine, prediction: Prediction | None, copies: MemoryCopies | None = None
) -> dict[str, Any] | None:
    """None: the plan offloads nothing, and no copies of the state are in host memory."""
    counted, record = engine.host_terms(), prediction.estimate.offload if prediction is not None else None
    predicted = record.host_terms if record is not None else {}
    if not counted and not predicted and copies is None:
        return None
    is_known = record is not None
    terms = {name: _row(name, predicted, counted, is_known=is_known) for name in {**predicted, **counted}}
    if copies is not None:
        expected = copies.num_files * _state_bytes(prediction) if prediction is not None and not counted else None
        terms[COPIES] = row(predicted=expected, measured=copies.host_bytes)
    return {
        "host": {
            "terms": terms,
            "total": total_row(terms),
            "process_peak_bytes": process_peak_bytes(),
        },
        "transfers": [_with_hidden(one) for one in record.transfers] if record is not None else [],
    }


def _state_bytes(prediction: Prediction) -> int:
    """Of a rank's weights, in their widest dtype, and optimizer states, when nothing is offloaded."""
    terms = prediction.estimate.memory_terms
    return round(sum(terms.get(name, 0) for name in (MemoryTerm.WEIGHTS, MemoryTerm.OPTIMIZER_STATE)))


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
