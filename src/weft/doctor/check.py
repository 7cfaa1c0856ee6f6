"""One line of the doctor's answer: name, state, detail, fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, WRONG, UNKNOWN = "ok", "warning", "wrong", "unknown"
_ORDER = (WRONG, WARNING, UNKNOWN, OK)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`fix` is what to do; empty for a check that is ok. `host` is empty for a comparison of hosts."""

    name: str
    state: str
    detail: str
    fix: str = ""
    host: str = ""

    def as_dict(self) -> dict[str, str]:
        fields = {"name": self.name, "state": self.state, "detail": self.detail, "fix": self.fix}
        return {**fields, "host": self.host} if self.host else fields


def ok(name: str, detail: str) -> Diagnosis:
    return Diagnosis(name=name, state=OK, detail=detail)


def warning(name: str, detail: str, fix: str) -> Diagnosis:
    return Diagnosis(name=name, state=WARNING, detail=detail, fix=fix)


def wrong(name: str, detail: str, fix: str) -> Diagnosis:
    return Diagnosis(name=name, state=WRONG, detail=detail, fix=fix)


def unknown(name: str, detail: str, fix: str = "") -> Diagnosis:
    return Diagnosis(name=name, state=UNKNOWN, detail=detail, fix=fix)


def worst_first(checks: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Checks by state, comparisons of hosts before single hosts; otherwise in the given order."""
    return sorted(checks, key=lambda check: (_ORDER.index(check.state), bool(check.host)))


def shortened(items: Iterable[str], most: int = 4) -> str:
    """The first items, and the number of the others."""
    listed = list(items)
    rest = len(listed) - most
    return "; ".join(listed[:most]) + (f"; and {rest} more" if rest > 0 else "")
