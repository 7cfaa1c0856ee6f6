"""The verdict: every check with its outcome, and the first finding in one paragraph. JSON in and out, no torch.

A finding names the rule of the design that it breaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weft.core import axes

RULES = {
    1: "one owner of loss normalisation: sums and token counts, divided once by the count of the global batch",
    2: "the gradient norm follows from ownership",
    3: "data order is a function of (seed, step) alone",
    4: "initial weights and dropout do not depend on the layout",
    5: "checkpoints are logical and resumable on any layout",
    6: "precision is what was asked",
    7: "the loss is reduced to the logging rank",
    9: "coverage, traffic and memory are reported, and the measured values are the declared ones",
    11: "buffers that forwards change are those of one process, equal on every rank",
    12: "code shared by all layouts (model, loss, update, schedule, data, export) agrees with torch and transformers",
    13: "choices of experts are counted once, over the global batch; biases follow the counts, alike on all ranks",
    14: "all copies of a parameter compute with equal weights",
    15: "a reference is of the initial weights, row by row",
    10: "servers hold the rows of one process: every update once, weighted by its samples, in a known order",
}

SHOWN_NAMES = 4  # of parameters, in a line of text; JSON has all

# Checks that follow one run step by step: a wrong update in step 1 causes a wrong loss in step 2.
BY_STEP = (
    "forward weights",
    "loss",
    "gradients",
    "gradient norm",
    "rounded updates",
    "first update",
    "weights",
    "optimizer state",
    "evaluation",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One wrong value and its location, as exactly as known."""

    rule: int
    expected: str
    found: str
    step: int | None = None
    parameter: str | None = None
    coordinates: str | None = None
    cause: str | None = None  # the likely one, of a script's finding

    def sentence(self) -> str:
        where = [f"step {self.step}" if self.step is not None else "", self.parameter or "", self.coordinates or ""]
        place = ", ".join(part for part in where if part)
        return f"{place + ': ' if place else ''}expected {self.expected}, found {self.found}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and its outcome. `finding` is set if and only if it failed."""

    name: str
    ok: bool
    detail: str
    finding: Finding | None = None
    margin: float = 0.0  # the largest difference over the allowed one: above 1 fails; 0 for bitwise comparisons

    @staticmethod
    def passed(name: str, detail: str, *, margin: float = 0.0) -> Check:
        return Check(name=name, ok=True, detail=detail, margin=margin)

    @staticmethod
    def failed(name: str, finding: Finding) -> Check:
        return Check(name=name, ok=False, detail=finding.sentence(), finding=finding)


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The parameter with the largest relative difference, passed or failed."""

    parameter: str = ""
    rel_diff: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One parameter: the axes that shard it, and why tensor parallelism leaves it replicated."""

    name: str
    shape: tuple[int, ...]
    sharded_axes: tuple[str, ...]
    reason: str = ""

    @property
    def is_sharded(self) -> bool:
        return axes.TP in self.sharded_axes

    @property
    def is_divided(self) -> bool:
        """Whether tensor ranks hold different experts."""
        return axes.EP in self.sharded_axes and not self.is_sharded

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Coverage:
        shape, sharded_axes = tuple(fields["shape"]), tuple(fields["sharded_axes"])
        return Coverage(name=fields["name"], shape=shape, sharded_axes=sharded_axes, reason=fields["reason"])


def coverage_line(coverage: Sequence[Coverage]) -> str:
    """'sharded on tp: 14 of 20 parameters, 99% of the elements; replicated: a norm (6)'."""
    sharded = [row for row in coverage if row.is_sharded]
    share = sum(math.prod(row.shape) for row in sharded) / max(1, sum(math.prod(row.shape) for row in coverage))
    rest = [row for row in coverage if not row.is_sharded and not row.is_divided]
    reasons = Counter(row.reason or "no reason given" for row in rest)
    listed = ", ".join(f"{why} ({count})" for why, count in reasons.most_common())
    experts = sum(row.is_divided for row in coverage)
    divided = f"; on ep: {experts} of experts" if experts else ""
    replicated = f"; replicated: {listed}" if listed else ""
    on_tp = f"sharded on tp: {len(sharded)} of {len(coverage)} parameters, {share:.0%} of the elements"
    return on_tp + divided + replicated


def untrained_line(names: Sequence[str]) -> str:
    """'no gradient in one process either (9 parameters keep their values): a.weight, ..., and 6 more'."""
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    what = "1 parameter keeps its value" if len(names) == 1 else f"{len(names)} parameters keep their values"
    return f"no gradient in one process either ({what}): {', '.join(names[:SHOWN_NAMES])}{more}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to: does this plan compute the right thing?"""

    plan: str
    steps: int
    checks: tuple[Check, ...]
    loss_max_abs_diff: float = 0.0
    grad_norm_max_rel_diff: float = 0.0
    worst_gradient: Worst = Worst()
    worst_weight: Worst = Worst()
    replicated_parameters: tuple[str, ...] = ()  # with tensor parallelism: replicated on the tp axis
    untrained_parameters: tuple[str, ...] = ()  # trainable, but without a gradient in one process too
    coverage: tuple[Coverage, ...] = ()  # with tensor parallelism: axes of every parameter, reasons of replicated ones
    changes: tuple[str, ...] = ()  # made by shrinking
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def first_wrong(self) -> Check | None:
        """The first failed check; among checks by step, the one with the earliest step."""
        failed = [check for check in self.checks if not check.ok]
        if not failed or failed[0].name not in BY_STEP:
            return failed[0] if failed else None
        return min((check for check in failed if check.name in BY_STEP), key=_step_of)

    @property
    def _first_name(self) -> str | None:
        return self.first_wrong.name if self.first_wrong else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON: a number that is not finite is null."""
        fields: dict[str, Any] = _without_infinities({"ok": self.ok, "first_wrong": self._first_name, **asdict(self)})
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Verdict:
        values = {key: value for key, value in fields.items() if key not in ("ok", "first_wrong")}
        for key in ("loss_max_abs_diff", "grad_norm_max_rel_diff"):
            values[key] = _number(values[key])
        values["checks"] = tuple(_check_from(check) for check in values["checks"])
        for key in ("worst_gradient", "worst_weight"):
            values[key] = Worst(parameter=values[key]["parameter"], rel_diff=_number(values[key]["rel_diff"]))
        for key in ("replicated_parameters", "untrained_parameters", "changes"):
            values[key] = tuple(values.get(key, ()))
        values["coverage"] = tuple(Coverage.from_dict(row) for row in values.get("coverage", ()))
        return Verdict(**values)

    def text(self) -> str:
        """The printed form: the outcome, one line per check, then the first finding and its rule."""
        lines = [f"{'PASS' if self.ok else 'FAIL'}  {self.plan}"]
        lines += [f"  {coverage_line(self.coverage)}"] if self.coverage else []
        lines += [f"  {untrained_line(self.untrained_parameters)}"] if self.untrained_parameters else []
        lines += [f"  {'ok  ' if check.ok else 'FAIL'}  {check.name:18s} {check.detail}" for check in self.checks]
        wrong = self.first_wrong
        if wrong is not None and wrong.finding is not None:
            rule = wrong.finding.rule
            lines += [
                "",
                f"first wrong: {wrong.name}: {wrong.finding.sentence()}",
                *([f"likely cause: {wrong.finding.cause}"] if wrong.finding.cause else []),
                f"breaks rule {rule}: {RULES[rule]}",
            ]
        return "\n".join(lines)


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _step_of(check: Check) -> int:
    return (check.finding.step or 0) if check.finding else 0


def at_place(finding: Finding, place: str) -> Finding:
    """The finding with its location set."""
    return replace(finding, coordinates=place)


def _check_from(fields: Mapping[str, Any]) -> Check:
    finding = fields.get("finding")
    return Check(**{**fields, "finding": Finding(**finding) if finding else None})


@dataclass(frozen=True, kw_only=True)
class VerdictTable:
    """Verdicts of several plans over one run, for a table."""

    run: str
    verdicts: tuple[Verdict, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return bool(self.verdicts) and all(verdict.ok for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "run": self.run, "verdicts": [verdict.as_dict() for verdict in self.verdicts]}
