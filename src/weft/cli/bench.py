"""`weft bench step`: time and memory of a rank's step, beside a plain Hugging Face loop on the same device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.options import DeviceChoice, RunOrModel, Settings

bench_app = typer.Typer(
    name="bench", help="Measure the speed and memory of a training step.", no_args_is_help=True, rich_markup_mode=None
)


@bench_app.callback()
def bench() -> None:
    """Measure a plan on this machine."""


@bench_app.command()
def step(
    run: RunOrModel = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: a data-parallel layout of any number of ranks.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before the timed ones; the first compiles.")] = 3,
    against: Annotated[bool, typer.Option(help="Measure a plain Hugging Face loop too.")] = True,
    settings: Settings = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="Where to measure; auto takes the GPU when there is one.")
    ] = DeviceChoice.AUTO,
    out: Annotated[Path | None, typer.Option(help="Write the dated result to this markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON on stdout.")] = False,
) -> None:
    """Time the training step of rank 0 of a plan: tokens/s, MFU, peak memory, kernels by class."""
    from weft.cli.resolve import plan_tables, require_known_sections, resolve_model
    from weft.core.plan import Plan
    from weft.core.quiet import quiet_libraries
    from weft.plan.resolve import resolve

    given = settings or []
    require_known_sections(given)
    quiet_libraries()
    import torch

    from weft.train.bench import Bench, measure_engine, measure_plain
    from weft.train.devices import choose_device_type, local_devices

    kind = choose_device_type(device.value, local_ranks=1)
    tables, source = plan_tables(plan, given), str(plan or "the plan")
    asked = Plan.from_tables(tables, source=source)
    spec = resolve_model(run, given, rows=asked.mesh.dp_degree * asked.pipeline.microbatches)
    layout = resolve(
        tables,
        spec,
        on_gpu=kind == "cuda",
        devices=lambda count: local_devices(count, device_type=kind),
        source=source,
    )
    question = Bench(run=spec, plan=layout, device=torch.device(kind), steps=steps, warmup=warmup)
    _print_progress("measuring weft's step")
    found, techniques, notes = measure_engine(question)
    plain = None
    if against:
        _print_progress("measuring a plain Hugging Face loop")
        plain = measure_plain(question)
    answer = {
        **found.as_dict(),
        "tokens": question.tokens,
        "plan": layout.model_dump(mode="json"),
        "fast_path": [technique.as_dict() for technique in techniques],
        "notes": list(notes),
        "plain": plain.as_dict() if plain is not None else None,
        "device": torch.cuda.get_device_name() if kind == "cuda" else "CPU",
        "versions": _versions(),
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_markdown(answer))
    print(json.dumps(answer) if as_json else _markdown(answer))


def _print_progress(text: str) -> None:
    print(f"{text} …", file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    import torch
    import transformers

    import weft

    return {"weft": weft.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def _markdown(answer: dict[str, Any]) -> str:
    """The dated result: hardware, versions, and the two loops side by side."""
    from datetime import date

    from weft.core.units import format_bytes, format_seconds

    versions = ", ".join(f"{name} {version}" for name, version in answer["versions"].items())
    loops: list[dict[str, Any]] = [answer, *([answer["plain"]] if answer["plain"] else [])]
    lines = [
        f"# A step, {date.today():%Y-%m-%d}",
        "",
        f"{answer['device']}; {versions}; {answer['tokens']:,} tokens per step and rank; median of "
        f"{len(answer['steps_s'])} steps. One rank is measured alone: no network.",
        "",
        "| loop | tokens/s | step | MFU | peak allocated | peak reserved | first step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for loop in loops:
        if loop["failed"]:
            lines.append(f"| {loop['name']} | {loop['failed']} | | | | | |")
            continue
        mfu = f"{loop['mfu']:.1%}" if loop["mfu"] is not None else "-"
        memory = [
            format_bytes(loop[key]) if loop[key] else "-" for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        ]
        lines.append(
            f"| {loop['name']} | {loop['tokens_per_s']:,.0f} | {format_seconds(loop['step_s'])} | {mfu} | "
            f"{memory[0]} | {memory[1]} | {format_seconds(loop['first_step_s'])} |"
        )
    if answer["kernels"]:
        lines += ["", "| kernels | of weft's step |", "| --- | --- |"]
        lines += [f"| {name} | {format_seconds(seconds)} |" for name, seconds in answer["kernels"].items()]
    lines += ["", "| technique | on | why |", "| --- | --- | --- |"]
    lines += [f"| {row['technique']} | {'yes' if row['on'] else 'no'} | {row['why']} |" for row in answer["fast_path"]]
    return "\n".join([*lines, *(f"\n{note}" for note in answer["notes"]), ""])
