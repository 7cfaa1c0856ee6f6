"""`MetricsFile`: metrics.jsonl, one record per line, generic over the kind of record.

Written lines do not change; a resume drops the lines of steps that will be repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from weft.core.disk import writing
from weft.core.json_files import parse_json_table


class Stepped(Protocol):
    """A record of one step with a JSON form."""

    @property
    def step(self) -> int: ...

    def as_dict(self) -> dict[str, Any]: ...


Record = TypeVar("Record", bound=Stepped)


class MetricsFile(Generic[Record]):
    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], Record]) -> None:
        self.path, self._parse = path, parse

    def read(self) -> list[Record]:
        """All records; lines truncated by a crash are skipped."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_bytes().splitlines():
            try:
                fields = parse_json_table(line)
                if isinstance(fields.get("step"), int):
                    records.append(self._parse(fields))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
        return records

    def append(self, record: Record) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def drop_after(self, step: int) -> list[Record]:
        """Keep the lines up to `step`."""
        kept = [record for record in self.read() if record.step <= step]
        draft = self.path.with_suffix(".tmp")
        with writing(self.path):
            draft.write_text("".join(map(_line, kept)), encoding="utf-8")
        draft.replace(self.path)
        return kept


def _line(record: Stepped) -> str:
    return json.dumps(record.as_dict()) + "\n"
