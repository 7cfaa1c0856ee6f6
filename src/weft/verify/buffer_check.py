"""Buffers that forwards change: equal on every rank that has them, and those of one process over the same rows.

Where updates are delayed the reference keeps none, and equality alone is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.verify.checks import check_tensors
from weft.verify.evidence import Evidence
from weft.verify.reference import RunTrace, Tensors
from weft.verify.verdict import Check, Finding

NAME, RULE = "buffers", 11


def check_buffers(truth: RunTrace, same: RunTrace, found: Evidence, *, step: int, noise_share: float) -> Check:
    if not found.buffers and not truth.buffers:
        return Check.passed(NAME, "no forward changes any")
    odd = _odd(found.buffer_digests)
    if odd is not None:
        finding = Finding(rule=RULE, parameter=odd, expected="equal bits on every rank", found="other bits on some")
        return Check.failed(NAME, finding)
    if not truth.buffers:
        return Check.passed(NAME, f"{len(found.buffers)} that forwards change, equal bits on every rank")
    near = {**_numbers(truth.buffers), **_numbers(same.buffers)}
    check, _ = check_tensors(
        NAME, _numbers(truth.buffers), near, _numbers(found.buffers),
        rule=RULE, dtype="float32", step=step, noise_share=noise_share,
    )  # fmt: skip
    return check


def _odd(digests: Mapping[str, Sequence[int]]) -> str | None:
    return next((name for name, by_rank in digests.items() if len(set(by_rank)) > 1), None)


def _numbers(buffers: Tensors) -> Tensors:
    """Counters and flags too."""
    return {name: value.double() for name, value in buffers.items()}
