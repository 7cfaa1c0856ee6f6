"""Bounds on the difference between measured and predicted terms; beyond them the run warns. All bounds are here."""

from __future__ import annotations

from typing import Any

from weft.core.units import format_bytes

# The cost model agrees with dry runs within 2% of the peak over families and stages; single terms exchange bytes at the
# peak (a temporary in one is an activation in the other). A tenth of a term is beyond that.
MEMORY_SHARE = 0.10
# Allocators round, kernels use workspaces, schedules shift the peak by a tensor or two: a smaller difference never
# decides whether a plan fits.
MEMORY_FLOOR_BYTES = 64 * 2**20
# Collectives are counted, not estimated: formula and count must be equal.
TRAFFIC_BYTES = 0


def memory_warnings(terms: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence per term beyond both bounds."""
    return [_sentence(f"memory term {term}", row) for term, row in terms.items() if _is_memory_off(row)]


def traffic_warnings(rows: list[dict[str, Any]]) -> list[str]:
    """One sentence per kind of collective that differs from its prediction."""
    return [
        _sentence(f"traffic on {row['axis']}, {row['collective']} in the {row['phase']}", row)
        for row in rows
        if _difference(row) is not None and abs(_difference(row) or 0) > TRAFFIC_BYTES
    ]


def _is_memory_off(row: dict[str, Any]) -> bool:
    difference = _difference(row)
    return difference is not None and abs(difference) > max(MEMORY_FLOOR_BYTES, MEMORY_SHARE * row["predicted"])


def _difference(row: dict[str, Any]) -> float | None:
    if row["predicted"] is None or row["measured"] is None:
        return None
    return float(row["measured"] - row["predicted"])


def _sentence(name: str, row: dict[str, Any]) -> str:
    error = f" ({row['error']:+.1%})" if row["error"] is not None else ""
    return f"{name}: predicted {format_bytes(row['predicted'])}, measured {format_bytes(row['measured'])}{error}"
