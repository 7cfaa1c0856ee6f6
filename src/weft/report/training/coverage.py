"""The coverage list of a model, grouped so that it can be read. Values only; the markup is in coverage_table.

Inside a unit, parameters that differ only in an index become one row (experts.*.w1); units with equal rows become one
group (model.layers.0–31). A model of 10,000 parameters comes down to a few dozen rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.core.records import ParameterRecord

MAX_RANGES = 8

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a dotted part made of digits
_ITEM_BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}


@dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """`count` parameters of a unit that differ in an index at most; names are relative to the unit."""

    record: ParameterRecord
    count: int

    @property
    def elements(self) -> int:
        """Elements of one of them."""
        return math.prod(self.record.shape)


@dataclass(frozen=True, kw_only=True)
class UnitGroup:
    """Units whose rows are equal."""

    units: tuple[str, ...]
    rows: tuple[CoverageRow, ...]

    @property
    def num_parameters(self) -> int:
        return len(self.units) * sum(row.count for row in self.rows)

    @property
    def elements(self) -> int:
        return len(self.units) * sum(row.count * row.elements for row in self.rows if row.record.tied_to is None)

    @property
    def label(self) -> str:
        return label_units(self.units)


def parse_records(fields: Iterable[dict[str, Any]]) -> list[ParameterRecord]:
    """The ledger's rows as records, without those that have no name or shape."""
    return [_parse(row) for row in fields if isinstance(row.get("name"), str) and _is_shape(row.get("shape"))]


def group_coverage(records: Iterable[ParameterRecord]) -> list[UnitGroup]:
    """The records grouped, in the order of the units."""
    by_unit: dict[str, list[ParameterRecord]] = {}
    for record in records:
        by_unit.setdefault(record.unit, []).append(record)
    alike: dict[tuple[str, tuple[CoverageRow, ...]], list[str]] = {}
    for unit, members in by_unit.items():
        alike.setdefault((_masked(unit), fold_unit(unit, members)), []).append(unit)
    return [UnitGroup(units=tuple(units), rows=rows) for (_, rows), units in alike.items()]


def fold_unit(unit: str, records: Sequence[ParameterRecord]) -> tuple[CoverageRow, ...]:
    """The rows of one unit."""
    alike: dict[ParameterRecord, list[str]] = {}
    for record in records:
        name, tied_to = (value and value.removeprefix(f"{unit}.") for value in (record.name, record.tied_to))
        key = replace(record, name=_masked(name or ""), tied_to=tied_to and _masked(tied_to), unit="")
        alike.setdefault(key, []).append(name or "")
    return tuple(
        CoverageRow(record=replace(key, name=names[0]) if len(names) == 1 else key, count=len(names))
        for key, names in alike.items()
    )


def label_units(units: Sequence[str]) -> str:
    """('h.0', 'h.1', 'h.2', 'h.7') -> 'h.0–2, 7'."""
    if len(units) == 1:
        return units[0]
    parts = [unit.split(".") for unit in units]
    differing = [place for place, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(differing) != 1 or not all(part[differing[0]].isdigit() for part in parts):
        return f"{units[0]} … {units[-1]}"
    place = differing[0]
    spans = _spans(sorted(int(part[place]) for part in parts))
    shown = ", ".join(spans[:MAX_RANGES]) + (", …" if len(spans) > MAX_RANGES else "")
    return ".".join([*parts[0][:place], shown, *parts[0][place + 1 :]])


def item_bytes(dtype: str) -> int | None:
    """Bytes of one element, from the digits of the dtype's name; None where the name has none."""
    digits = re.search(r"(?:float|bfloat|int)(64|32|16|8)", dtype)
    return _ITEM_BYTES[digits.group(1)] if digits else None


def _spans(numbers: list[int]) -> list[str]:
    spans: list[tuple[int, int]] = []
    for value in numbers:
        if spans and value == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], value)
        else:
            spans.append((value, value))
    return [f"{low}" if low == high else f"{low}–{high}" for low, high in spans]


def _masked(name: str) -> str:
    return _INDEX.sub("*", name)


def _parse(row: dict[str, Any]) -> ParameterRecord:
    local, tied_to = row.get("local_elements"), row.get("tied_to")
    return ParameterRecord(
        name=row["name"],
        shape=tuple(row["shape"]),
        dtype=str(row.get("dtype", "?")).removeprefix("torch."),
        unit=str(row.get("unit", "(root)")),
        sharded_axes=_names(row.get("sharded_axes")),
        replicated_axes=_names(row.get("replicated_axes")),
        local_elements=local if isinstance(local, int) else math.prod(row["shape"]),
        tied_to=None if tied_to is None else str(tied_to),
        trainable=row.get("trainable", True) is not False,
        reason=str(row.get("reason") or ""),
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(size, int) for size in value)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in value) if isinstance(value, list | tuple) else ()
