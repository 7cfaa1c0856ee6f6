"""What a change of a plan saves of a peak that a dry run found: the estimates say which share of each term goes.

    saves = sum over terms of  bytes at the peak x (1 - estimate after / estimate before)

No change saves more of a term than is there. What is outside the allocator (communicators, the device's context) is no
part of a dry run's peak, so nothing of it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.terms import MemoryTerm


def saved_bytes(
    before: Mapping[str, float], after: Mapping[str, float], *, at_peak: Mapping[str, int] | None = None
) -> float:
    """What a change saves of `at_peak`, which is made of the same terms as the estimates; of `before` without it.

    Each term shrinks, or grows, as its estimate does. A term that only the estimate has saves nothing, and one that
    comes anew costs what the estimate says.
    """
    if at_peak is None:
        return sum(before.values()) - sum(after.values())
    inside = {*before, *after} - {str(MemoryTerm.FRAMEWORK)}
    return sum(_saved_of(before.get(term, 0.0), after.get(term, 0.0), at_peak.get(term, 0)) for term in inside)


def _saved_of(before: float, after: float, has: float) -> float:
    if has and before:
        return has * (1 - after / before)
    return min(0.0, before - after)
