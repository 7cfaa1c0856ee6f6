"""Rows of the ledger: the predicted, dry-run and measured value of one term, and their relative errors.

    error = measured / predicted - 1        dry_run_error = measured / dry_run - 1

None stands for "not known", never for zero; an error needs both its sides, and a prediction above zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weft.core.terms import MemoryTerm, TimeTerm
from weft.train.ledger.measuring import Measured
from weft.train.ledger.predicted import Prediction

Row = dict[str, Any]
FRAMEWORK = str(MemoryTerm.FRAMEWORK)


def row(*, predicted: float | None = None, dry_run: float | None = None, measured: float | None = None) -> Row:
    found = {"predicted": predicted, "dry_run": dry_run, "measured": measured, "error": _error(measured, predicted)}
    return {**found, "dry_run_error": _error(measured, dry_run)} if dry_run is not None else found


def memory_rows(prediction: Prediction | None, measured: Mapping[str, int] | None) -> dict[str, Row]:
    """One row per term. Memory outside the tensor allocator is predicted only; a term with no bytes has no row."""
    predicted = prediction.estimate.memory_terms if prediction else {}
    names = [str(term) for term in MemoryTerm if predicted.get(term) or (measured or {}).get(term)]
    return {
        name: row(
            predicted=predicted.get(name, 0) if prediction else None,
            measured=measured.get(name, 0) if measured is not None and name != FRAMEWORK else None,
        )
        for name in names
    }


def total_row(terms: Mapping[str, Row]) -> Row:
    """The allocator's peak: all terms except the framework's."""
    inside = [entry for name, entry in terms.items() if name != FRAMEWORK]
    return row(predicted=_sum(inside, "predicted"), measured=_sum(inside, "measured"))


def traffic_rows(prediction: Prediction | None, measured: Measured | None) -> list[Row]:
    """One row per (axis, collective, phase) of either side."""
    predicted = _by_kind(prediction.estimate.traffic) if prediction else {}
    found = _by_kind(measured.traffic) if measured else {}
    rows = []
    for kind in sorted({*predicted, *found}):
        sides = row(
            predicted=_bytes(predicted, kind, is_known=prediction is not None),
            measured=_bytes(found, kind, is_known=measured is not None),
        )
        count = (found if measured else predicted).get(kind, {}).get("count", 0)
        rows.append({**_named(kind), "count": count, **sides})
    return rows


def time_rows(prediction: Prediction | None, seconds: Mapping[TimeTerm, float]) -> dict[str, Row]:
    """One row per term. A pipeline measures forward and backward together: they have no rows then, not zeros."""
    predicted = prediction.time_terms if prediction else {}
    both_s = seconds.get(TimeTerm.FORWARD_BACKWARD, 0.0)
    hidden = {term for term in (TimeTerm.FORWARD, TimeTerm.BACKWARD) if both_s and not seconds.get(term)}
    known = {term: value for term, value in seconds.items() if term not in hidden}
    return {str(term): row(predicted=predicted.get(term), measured=value) for term, value in known.items()}


def collective_rows(measured: Measured | None) -> list[Row]:
    """Seconds from issue to completion, overlapped or not, of collectives whose backend reports them."""
    found = measured.collective_s if measured else {}
    return [{"axis": axis, "collective": name, **row(measured=value)} for (axis, name), value in sorted(found.items())]


def with_dry_run(ledger: dict[str, Any], dry: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger with the dry-run column filled from the output of `python -m weft.dryrun`."""
    memory, terms = dict(ledger["memory"]), dry["memory"]["terms"]
    rows = {
        name: _with(memory["terms"].get(name) or row(), terms.get(name, 0) if name != FRAMEWORK else None)
        for name in _ordered({*memory["terms"], *terms})
    }
    memory |= {"terms": rows, "total": _with(memory.get("total") or row(), dry["memory"]["peak_bytes"])}
    memory["peak_at"] = {**memory.get("peak_at", {}), "dry_run": dry["memory"].get("peak_at")}
    if dry["memory"].get("reserved_bytes"):
        memory["dry_run_reserved_bytes"] = dry["memory"]["reserved_bytes"]
    traffic = _traffic_with(ledger["traffic"], dry["traffic"])
    facts = {"rank": dry["rank"], "elapsed_s": dry["elapsed_s"], "flops": dry["flops"], "notes": dry["notes"]}
    return {**ledger, "memory": memory, "traffic": traffic, "dry_run": facts}


def _traffic_with(rows: Sequence[Row], dry: Iterable[Mapping[str, Any]]) -> list[Row]:
    known, found = {_kind(entry): entry for entry in rows}, _by_kind(dry)
    merged = []
    for kind in sorted({*known, *found}):
        entry = known.get(kind) or {**_named(kind), "count": found[kind]["count"], **row()}
        merged.append({**entry, **_with(entry, found.get(kind, {}).get("bytes", 0))})
    return merged


def _with(entry: Row, dry_run: float | None) -> Row:
    return row(predicted=entry["predicted"], dry_run=dry_run, measured=entry["measured"])


def _ordered(names: set[str]) -> list[str]:
    known = [str(term) for term in MemoryTerm if str(term) in names]
    return [*known, *sorted(names.difference(known))]


def _kind(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return entry["axis"], entry["collective"], entry["phase"]


def _named(kind: tuple[str, str, str]) -> Row:
    return dict(zip(("axis", "collective", "phase"), kind, strict=True))


def _by_kind(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    """Rows by kind, without collectives of one-rank groups, which send nothing."""
    return {_kind(entry): entry for entry in rows if entry["bytes"]}


def _bytes(rows: Mapping[Any, Mapping[str, Any]], kind: Any, *, is_known: bool) -> int | None:
    return int(rows.get(kind, {}).get("bytes", 0)) if is_known else None


def _sum(rows: Iterable[Row], side: str) -> float | None:
    values = [entry[side] for entry in rows if entry[side] is not None]
    return sum(values) if values else None


def _error(measured: float | None, expected: float | None) -> float | None:
    return measured / expected - 1 if measured is not None and expected else None
