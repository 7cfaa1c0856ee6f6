"""`weft plan`: the best layouts, their memory and speed, and the reasons. No torch, no devices. Exit 1 if none fits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.inference import inference
from weft.cli.schedule import schedule
from weft.core.optimizers import NAMES
from weft.plan.inference import CacheKind, WeightKind


class Explained(StrEnum):
    """The parts that --explain prints."""

    MEMORY = "memory"
    TIME = "time"
    TRAFFIC = "traffic"
    PRECISION = "precision"


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A model's name, a config.json or a folder with one, or a run.toml.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="8xH100-80GB, or 4x8xH100-80GB for 4 nodes of 8.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per step.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=NAMES)] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 | bf16 | fp16 | deepseek-v3 | ...")] = None,
    plan_path: Annotated[Path | None, typer.Option("--plan", help="Estimate just this plan.toml.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Fix a key of the plan: mesh.tp=8; or model.attention, data.document_length; may be repeated."
        ),
    ] = None,
    trains: Annotated[bool, typer.Option("--trains", help="Only layouts that this version of weft trains.")] = False,
    dryrun: Annotated[bool, typer.Option("--dryrun", help="Confirm the listed plans by dry run.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Number of plans to list.")] = 5,
    largest: Annotated[
        str | None, typer.Option(help="Instead of a model: the largest of this type (llama) that the devices train.")
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="The longest rows that the devices train, by mesh.cp.")
    ] = False,
    host_memory: Annotated[str | None, typer.Option(help="Memory of each node's host: 128GB, 2TiB.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the best plan to this file.")] = None,
    explain: Annotated[Explained | None, typer.Option(help="Print the arithmetic of the best plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")] = False,
    # The older forms of `weft inference` and `weft schedule`.
    old_inference: Annotated[bool, typer.Option("--inference", hidden=True)] = False,
    weights: Annotated[WeightKind, typer.Option(hidden=True)] = "bf16",
    kv_cache: Annotated[CacheKind, typer.Option("--kv-cache", hidden=True)] = "bf16",
    concurrent: Annotated[int, typer.Option(min=1, hidden=True)] = 1,
    context: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
    draw_schedule: Annotated[str | None, typer.Option(hidden=True)] = None,
    stages: Annotated[int, typer.Option(min=1, hidden=True)] = 4,
    microbatches: Annotated[int, typer.Option(min=1, hidden=True)] = 8,
) -> None:
    """Search every legal layout of a model on devices: memory, traffic, time, and why. Needs neither torch nor GPUs."""
    from weft.core.errors import InputError
    from weft.core.units import parse_bytes

    if draw_schedule is not None:
        schedule(draw_schedule, stages=stages, microbatches=microbatches, out=out, as_json=as_json)
        return
    asked: dict[str, Any] = {
        "settings": settings or [], "precision": precision, "optimizer": optimizer, "global_batch": global_batch,
        "sequence_length": sequence_length,
        "host_memory_bytes": parse_bytes(host_memory, name="--host-memory") if host_memory is not None else None,
    }  # fmt: skip
    if largest is not None:
        given = {"a model": model, "--plan": plan_path, "--out": out, "--explain": explain}
        _largest(largest, devices, refused={**given, "--trains": trains, "--dryrun": dryrun}, as_json=as_json, **asked)
        return
    if model is None:
        raise InputError("no model was given", hint="weft plan llama-3-8b --devices 8xH100-80GB")
    if devices is None:
        raise InputError("no devices were given", hint=f"weft plan {model} --devices 8xH100-80GB")
    if longest:
        refused = {"--plan": plan_path, "--out": out, "--explain": explain, "--trains": trains, "--dryrun": dryrun}
        _longest(model, devices, refused=refused, as_json=as_json, **asked)
        return
    if old_inference:
        inference(model, devices, weights, kv_cache, concurrent=concurrent, context=context, as_json=as_json)
        return
    from weft.cli.plan.answer import find_plans, print_answer, write_plan
    from weft.cli.plan.confirm import confirm

    question, answer = find_plans(model, devices, plan_path=plan_path, only_trained=trains, top=top, **asked)
    confirmed = confirm(question, answer, model=model) if dryrun else None
    print_answer(question, answer, confirmed, explain=explain.value if explain else None, as_json=as_json)
    if out is not None:
        write_plan(question, answer, out, command=f"weft plan {model} --devices {devices}")
    is_refuted = confirmed is not None and confirmed[0].fits is False
    raise typer.Exit(code=0 if answer.plans[0].fits and not is_refuted else 1)


def _largest(family: str, devices: str | None, **asked: Any) -> None:
    """Exit 1 if no model of the family fits."""
    from weft.cli.plan.largest import print_largest
    from weft.core.errors import InputError

    if devices is None:
        raise InputError("no devices were given", hint=f"weft plan --largest {family} --devices 1xH200")
    raise typer.Exit(code=0 if print_largest(family, devices, **asked) else 1)


def _longest(model: str, devices: str, **asked: Any) -> None:
    """Exit 1 if no rows fit."""
    from weft.cli.plan.longest import print_longest

    raise typer.Exit(code=0 if print_longest(model, devices, **asked) else 1)
