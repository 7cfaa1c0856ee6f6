"""Check of the buffers that forwards change: equal on every rank that has them, and equal to those of one process.

With delayed updates the reference has no buffers, and only the equality between ranks is checked.
"""

from __future__ import annotations

from weft.verify.checks import check_tensors
from weft.verify.evidence import Evidence
from weft.verify.run_trace import RunTrace, Tensors
from weft.verify.verdict import Check, Finding

NAME, RULE = "buffers", 11


def check_buffers(truth: RunTrace, same: RunTrace, found: Evidence, *, step: int, noise_share: float) -> Check:
    if not found.buffers and not truth.buffers:
        return Check.passed(NAME, "no forward changes a buffer")
    differing = next((name for name, by_rank in found.buffer_digests.items() if len(set(by_rank)) > 1), None)
    if differing is not None:
        finding = Finding(
            rule=RULE, parameter=differing, expected="equal bits on every rank", found="different bits on some ranks"
        )
        return Check.failed(NAME, finding)
    if not truth.buffers:
        return Check.passed(NAME, f"{len(found.buffers)} changed by forwards, equal bits on every rank")
    near = {**_numbers(truth.buffers), **_numbers(same.buffers)}
    check, _ = check_tensors(
        NAME, _numbers(truth.buffers), near, _numbers(found.buffers),
        rule=RULE, dtype="float32", step=step, noise_share=noise_share,
    )  # fmt: skip
    return check


def _numbers(buffers: Tensors) -> Tensors:
    """Buffers in float64, counters and flags included."""
    return {name: value.double() for name, value in buffers.items()}
