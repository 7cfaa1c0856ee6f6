"""`weft plan MODEL --longest`: the longest rows that devices train, by degree of context parallelism."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.cli.plan.answer import devices_as_dict
from weft.cli.plan.settings import keys_beside
from weft.core.units import format_bytes, format_count
from weft.plan.ask import Question, ask
from weft.plan.longest import Longest, longest_rows
from weft.plan.words import describe


def print_longest(
    model: str,
    devices: str,
    *,
    settings: list[str],
    refused: dict[str, Any],
    as_json: bool,
    host_memory_bytes: int | None = None,
    **asked: Any,
) -> bool:
    """Print the answer; whether any rows fit. `refused`: options that have no meaning here, if given."""
    attention, fixed = keys_beside(
        "--longest",
        f"weft plan {model} --longest",
        settings=settings,
        refused={**refused, "--sequence-length": asked["sequence_length"]},
    )
    question = ask(model, devices, attention=attention, **asked)
    if host_memory_bytes is not None:
        question = question.with_host_memory(host_memory_bytes)
    found = longest_rows(question, fixed, global_batch=asked["global_batch"])
    if as_json:
        print(json.dumps({"devices": devices_as_dict(question), "longest": [one.as_dict() for one in found]}))
    else:
        _show(question, found)
    return any(one.sequence_length for one in found)


def _show(question: Question, found: list[Longest]) -> None:
    console = Console(highlight=False)
    request = question.request
    cluster, shape = request.cluster, request.shape
    memory = f"{cluster.num_devices:,} x {format_bytes(cluster.device.memory_bytes)}"
    console.print(f"{shape.name} on {cluster.name} ({memory}), {request.workload.optimizer}")
    console.print(f"the model's config has {shape.max_positions:,} positions", style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("mesh.cp", "longest row", "rows per step", "tokens/s", "plan"):
        table.add_column(name)
    for one in found:
        table.add_row(str(one.cp), *_cells(one))
    console.print(table)


def _cells(one: Longest) -> tuple[str, str, str, str]:
    if one.best is None:
        return "none", "", "", ""
    speed, plan = format_count(one.best.tokens_per_s), describe(one.best.plan)
    return f"{one.sequence_length:,}", f"{one.global_batch:,}", speed, plan
