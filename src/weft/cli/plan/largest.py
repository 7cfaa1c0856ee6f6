"""`weft plan --largest`: the largest model of a family that devices and their host train, by way to offload."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.cli.plan.answer import devices_as_dict
from weft.cli.plan.settings import keys_beside
from weft.core.errors import InputError
from weft.core.units import format_bytes, format_count
from weft.plan.ask import Question
from weft.plan.largest import Largest, largest_models
from weft.plan.words import describe


def print_largest(
    family: str, devices: str, *, settings: list[str], refused: dict[str, Any], as_json: bool, **asked: Any
) -> bool:
    """Print the answer; whether any model fits. `refused`: options that have no meaning here, if given."""
    attention, fixed = keys_beside("--largest", f"weft plan --largest {family}", settings=settings, refused=refused)
    if attention is not None:
        raise InputError("--largest cannot be combined with --set model.attention", hint="leave it out")
    question, found = largest_models(family, devices, fixed=fixed, **asked)
    if as_json:
        print(json.dumps(as_dict(family, question, found)))
    else:
        _show(family, question, found)
    return any(one.shape is not None for one in found)


def as_dict(family: str, question: Question, found: list[Largest]) -> dict[str, Any]:
    """The object that --json prints."""
    workload = question.request.workload
    return {
        "family": family,
        "devices": {**devices_as_dict(question), "host_memory_bytes": question.request.cluster.host_memory_bytes},
        "workload": {
            "global_batch": workload.global_batch,
            "sequence_length": workload.sequence_length,
            "optimizer": workload.optimizer,
        },
        "largest": [one.as_dict() for one in found],
    }


def _show(family: str, question: Question, found: list[Largest]) -> None:
    console = Console(highlight=False)
    cluster, workload = question.request.cluster, question.request.workload
    console.print(
        f"{family} on {cluster.name} ({cluster.num_devices:,} x {format_bytes(cluster.device.memory_bytes)}), "
        f"{format_bytes(cluster.host_memory_bytes)} of host memory per node; "
        f"{workload.global_batch:,} x {workload.sequence_length:,} tokens per step, {workload.optimizer}"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("where states are", "largest of the zoo", "largest", "tokens/s", "host per node"):
        table.add_column(name)
    for one in found:
        table.add_row(one.way, *_cells(one))
    console.print(table)
    for one in found:
        if one.best is not None:
            console.print(f"{one.way}: {describe(one.best.plan)}", style="dim", markup=False)


def _cells(one: Largest) -> tuple[str, str, str, str]:
    if one.shape is None or one.best is None:
        return "none", "none", "", ""
    named = f"{one.named.name} ({format_count(one.named.num_parameters)})" if one.named else "none"
    largest = f"{format_count(one.shape.num_parameters)}: {one.shape.name}" if one.scaled else "the same"
    return named, largest, format_count(one.best.tokens_per_s), format_bytes(one.best.offload.host_bytes_per_node)
