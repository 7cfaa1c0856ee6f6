"""Records: JSON in and out, strictly, also for numbers that are not finite."""

from __future__ import annotations

import json
import math

from weft.core.records import StepRecord


def test_a_record_survives_strict_json() -> None:
    record = StepRecord(step=3, loss=2.5, grad_norm=1.0, tokens=64, learning_rate=1e-3, eval_loss=2.0)
    assert StepRecord.from_dict(json.loads(json.dumps(record.as_dict(), allow_nan=False))) == record


def test_an_overflowed_norm_is_null_and_comes_back_as_nan() -> None:
    record = StepRecord(step=1, loss=5.0, grad_norm=math.inf, tokens=8, learning_rate=1e-3, skipped=True)
    fields = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert fields["grad_norm"] is None
    assert math.isnan(StepRecord.from_dict(fields).grad_norm)
