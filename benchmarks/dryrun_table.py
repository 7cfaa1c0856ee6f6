"""The table of dryrun_memory.py: predictions beside measurements, what is out, and the verdicts. Text only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dryrun_cases import CASES, Case

GIB = 2**30
ALLOCATED_P95, ALLOCATED_WORST, RESERVED_P95, VERDICT_BAND = 0.005, 0.02, 0.015, 0.02
CAVEATS = (
    "Caveats first: one GPU, so ranks of many are real steps on a process group that sends nothing: no NCCL buffers.",
    "No compiled models. MoE rows depend on how random tokens fall on experts. Peaks are those of the fourth and fifth",
    "step. `edge` is a prediction between the two verdicts: allocated fits, reserved does not, so the allocator has to",
    "give cached memory back. GiB throughout.",
)


def compare(predicted_path: Path, measured_path: Path) -> str:
    """The table, with what must be known to read it first."""
    predicted = json.loads(predicted_path.read_text(encoding="utf-8"))
    rows = [_row(case, predicted["cases"].get(case.name), _line_of(case, measured_path)) for case in CASES]
    done = [row for row in rows if row["measured"]]
    ran = [row for row in done if not row["is_oom"]]
    device = next((row["record"] for row in ran), {})
    lines = [
        f"# Dry runs against one {device.get('device', 'GPU')}, {device.get('versions', {}).get('date', '')}",
        "",
        *CAVEATS,
        "",
        *_summary(ran, done),
        "",
        "| case | segments | allocated, predicted | measured | error | reserved, predicted | measured | error | fits |",
        "|" + " --- |" * 9,
        *(_printed(row) for row in rows),
        "",
        "Notes: " + "; ".join(f"{case.name}: {case.note}" for case in CASES if case.note) + ".",
        "",
        f"Predicted with {_words(predicted['versions'])}; measured with {_words(device.get('versions', {}))}.",
        "",
        "```console",
        f"python benchmarks/dryrun_memory.py predict --out {predicted_path}",
        f"python benchmarks/dryrun_memory.py measure --out {measured_path}",
        f"python benchmarks/dryrun_memory.py compare {predicted_path} {measured_path}",
        "```",
        "",
    ]
    return "\n".join(lines)


def _row(case: Case, predicted: dict[str, Any] | None, record: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case, "record": record or {}, "predicted": None, "measured": None}
    row["error"] = (record or {}).get("error") or (predicted or {}).get("error") or ""
    if predicted and "error" not in predicted:
        is_growing = (record or {}).get("expandable_segments", case.expandable)  # as it was, not only as it was asked
        mode = "expandable_segments" if is_growing else "fixed_segments"
        row["predicted"] = (predicted["allocated_bytes"], predicted["reserved_bytes"][mode])
    row["is_oom"] = bool(record and record.get("out_of_memory"))
    if record and "error" not in record:
        row["measured"] = (record["allocated_bytes"], record["reserved_bytes"])
    return row


def _line_of(case: Case, path: Path) -> dict[str, Any] | None:
    return next((record for record in lines_of(path) if record["name"] == case.name), None)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _summary(ran: list[dict[str, Any]], done: list[dict[str, Any]]) -> list[str]:
    both = [row for row in ran if row["predicted"]]
    capacity = next((row["record"]["free_bytes"] for row in ran), 0)
    full = [row for row in both if capacity and _verdict(row, capacity) == "edge"]
    text = []
    for index, name, p95, worst in (
        (0, "allocated", ALLOCATED_P95, ALLOCATED_WORST),
        (1, "reserved", RESERVED_P95, None),
    ):
        errors = sorted(
            abs(row["predicted"][index] / row["measured"][index] - 1)
            for row in both
            if row["measured"][index] and not (name == "reserved" and row in full)
        )
        if errors:
            at_95 = errors[math.ceil(0.95 * len(errors)) - 1]
            goal = f"goals {p95:.1%} and {worst:.0%}" if worst else f"goal {p95:.1%}"
            text.append(
                f"- {name}: 95th percentile {at_95:.2%}, worst {errors[-1]:.2%} of {len(errors)} cases ({goal})"
            )
    if full:
        names = ", ".join(row["case"].name for row in full)
        text.append(f"- reserved leaves out {names}: predicted without a limit, and the device was full")
    judged = [row for row in done if row["predicted"] and capacity]
    wrong = [row for row in judged if _is_wrong(row, capacity)]
    outside = [row for row in wrong if abs(row["predicted"][0] / capacity - 1) > VERDICT_BAND]
    names = ", ".join(row["case"].name for row in wrong) or "none"
    text.append(
        f"- verdict against {capacity / GIB:.2f} GiB free: {len(judged) - len(wrong)} of {len(judged)} right; "
        f"wrong: {names}; outside {VERDICT_BAND:.0%}: {len(outside)}"
    )
    for row in judged:
        row["verdict"] = f"{_verdict(row, capacity)} / {'out of memory' if row['is_oom'] else 'ran'}"
    return text


def _verdict(row: dict[str, Any], capacity_bytes: int) -> str:
    allocated, reserved = row["predicted"]
    if reserved <= capacity_bytes:
        return "fits"
    return "does not" if allocated > capacity_bytes else "edge"


def _is_wrong(row: dict[str, Any], capacity_bytes: int) -> bool:
    return _verdict(row, capacity_bytes) == ("fits" if row["is_oom"] else "does not")


def _printed(row: dict[str, Any]) -> str:
    case = row["case"]
    cells = [case.name, "growing" if case.expandable else "fixed"]
    for index in (0, 1):
        predicted = row["predicted"][index] if row["predicted"] else None
        measured = row["measured"][index] if row["measured"] and not row["is_oom"] else None
        cells += [_gib(predicted), _gib(measured) if not row["is_oom"] else "out of memory"]
        cells.append(f"{predicted / measured - 1:+.2%}" if predicted and measured else "")
    return "| " + " | ".join([*cells, row.get("verdict", row["error"].replace("|", " ")[:120])]) + " |"


def _gib(nbytes: int | None) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes is not None else "–"


def _words(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items() if name != "date") or "nothing"
