"""Records of gpu_step.py as a page: what each case measured, then every bar beside what was reached. No torch.

A record is one process: its group, case, round, and the figures it printed or the error it ended with. Figures of a
case are medians over its rounds; `first step` is that of its first round, which compiles, and of its last, which finds
what the first one compiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from gpu_cases import Bar, Group

Record = dict[str, Any]
GIB = 2**30
HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"


def rounds_of(records: Sequence[Record], group: str, case: str) -> list[Record]:
    """Those that measured something, in order of rounds."""
    found = [record for record in records if record["group"] == group and record["case"] == case]
    return sorted((record for record in found if "error" not in record), key=lambda record: record["round"])


def median_of(rounds: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in rounds if record.get(key) is not None]
    return statistics.median(values) if values else None


def ratio_of(records: Sequence[Record], group: Group, bar: Bar, key: str) -> float | None:
    ours, theirs = (median_of(rounds_of(records, group.name, name), key) for name in (bar.case, bar.against))
    return ours / theirs if ours and theirs else None


def verdict_of(records: Sequence[Record], group: Group, bar: Bar) -> str:
    speed = ratio_of(records, group, bar, "tokens_per_s")
    memory = ratio_of(records, group, bar, "peak_allocated_bytes")
    if speed is None or (bar.memory is not None and memory is None):
        return UNKNOWN
    is_small = bar.memory is None or (memory is not None and memory <= bar.memory)
    return HOLDS if speed >= bar.speed and is_small else FAILS


def group_verdict(records: Sequence[Record], group: Group) -> str:
    """Of all bars; of bars that are alternatives the best."""
    found = [verdict_of(records, group, bar) for bar in group.bars]
    order = (HOLDS, UNKNOWN, FAILS) if group.one_bar_is_enough else (FAILS, UNKNOWN, HOLDS)
    return next(verdict for verdict in order if verdict in found)


def table(records: Sequence[Record], groups: Sequence[Group]) -> str:
    """The whole page but its head: cases, what was on and where the time went, errors, and the bars last."""
    parts = [_cases(records, groups), _kernels(records, groups), _techniques(records, groups), _errors(records)]
    return "\n\n".join([part for part in parts if part] + [_bars(records, groups)]) + "\n"


def _cases(records: Sequence[Record], groups: Sequence[Group]) -> str:
    rows = [
        _case_row(group, case.name, found)
        for group in groups
        for case in group.cases
        if (found := rounds_of(records, group.name, case.name))
    ]
    head = ("group", "case", "tokens/s", "spread", "step ms", "MFU %", "allocated GiB", "reserved GiB", "first step s",
            "loss first", "last", "rounds")  # fmt: skip
    return _markdown(head, rows)


def _case_row(group: Group, name: str, rounds: list[Record]) -> list[str]:
    def told(key: str, form: str, unit: float = 1.0) -> str:
        value = median_of(rounds, key)
        return "–" if value is None else format(value / unit, form)

    speeds = [record["tokens_per_s"] for record in rounds]
    spread = (max(speeds) - min(speeds)) / statistics.median(speeds)
    return [
        group.name, name, told("tokens_per_s", ",.0f"), f"{spread:.1%}", told("step_s", ".1f", 1e-3),
        told("mfu", ".1f", 1e-2), told("peak_allocated_bytes", ".1f", GIB), told("peak_reserved_bytes", ".1f", GIB),
        _first_steps(rounds), told("loss_first", ".3f"), told("loss_last", ".3f"), str(len(rounds)),
    ]  # fmt: skip


def _first_steps(rounds: list[Record]) -> str:
    told = [f"{record['first_step_s']:.1f}" for record in rounds]
    return told[0] if len(told) == 1 else f"{told[0]}, {told[-1]}"


def _bars(records: Sequence[Record], groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        for bar in group.bars:
            speed = ratio_of(records, group, bar, "tokens_per_s")
            memory = ratio_of(records, group, bar, "peak_allocated_bytes")
            rows.append([
                group.name, bar.case, bar.against, _ratio(speed), f"≥ {bar.speed:.2f}", _ratio(memory),
                "–" if bar.memory is None else f"≤ {bar.memory:.2f}", verdict_of(records, group, bar),
            ])  # fmt: skip
        if group.one_bar_is_enough:
            said = group_verdict(records, group)
            rows.append([group.name, "either", "", "", "", "", "", said])
    head = ("group", "case", "against", "tokens/s, times", "bar", "memory, times", "bar", "verdict")
    return _markdown(head, rows)


def _kernels(records: Sequence[Record], groups: Sequence[Group]) -> str:
    """Milliseconds a step by class of kernel, of the newest round that told them."""
    rows = [
        [group.name, case.name, ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in _by_size(told))]
        for group in groups
        for case in group.cases
        if (told := _newest(records, group, case.name, "kernels"))
    ]
    return _markdown(("group", "case", "ms a step by class of kernel"), rows) if rows else ""


def _techniques(records: Sequence[Record], groups: Sequence[Group]) -> str:
    rows = [
        [group.name, case.name, entry["technique"], "on" if entry["on"] else "off", entry.get("why") or ""]
        for group in groups
        for case in group.cases
        for entry in _newest(records, group, case.name, "fast_path") or []
    ]
    return _markdown(("group", "case", "technique", "", "why"), rows) if rows else ""


def _errors(records: Sequence[Record]) -> str:
    rows = [
        [record["group"], record["case"], str(record["round"]), " ".join(record["error"].split()).replace("|", "/")]
        for record in records
        if "error" in record
    ]
    return _markdown(("group", "case", "round", "did not run"), rows) if rows else ""


def _newest(records: Sequence[Record], group: Group, case: str, key: str) -> Any:
    told = [record[key] for record in rounds_of(records, group.name, case) if record.get(key)]
    return told[-1] if told else None


def _by_size(kernels: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(kernels.items(), key=lambda item: -item[1])


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
