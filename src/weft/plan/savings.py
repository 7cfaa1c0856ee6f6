"""Bytes that a change of a plan saves at a dry run's peak: each term shrinks by the ratio of its estimates.

    saves = sum over terms of  bytes at the peak x (1 - estimate after / estimate before)

No change saves more of a term than its bytes at the peak. Memory outside the allocator (communicators, device context)
is not in a dry run's peak, so none of it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.terms import MemoryTerm


def saved_bytes(
    before: Mapping[str, float], after: Mapping[str, float], *, at_peak: Mapping[str, int] | None = None
) -> float:
    """Bytes saved of `at_peak`, which has the terms of the estimates; of `before` if it is None.

    Each term scales as its estimate does. A term that is not at the peak saves nothing, and a new term costs its
    estimate.
    """
    if at_peak is None:
        return sum(before.values()) - sum(after.values())
    inside = {*before, *after} - {str(MemoryTerm.FRAMEWORK)}
    return sum(_saved_of(before.get(term, 0.0), after.get(term, 0.0), at_peak.get(term, 0)) for term in inside)


def _saved_of(before: float, after: float, has: float) -> float:
    if has and before:
        return has * (1 - after / before)
    return min(0.0, before - after)
