"""`weft plan`: which layout, will it fit, how fast, and why. No torch, no devices. Exit 1 when nothing fits."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # imported inside the verb: `weft --help` must not pay for what it does not use
    from weft.cli.plan_dryrun import Confirmation
    from weft.plan.ask import Question
    from weft.plan.estimate import Estimate
    from weft.plan.search import Answer
    from weft.plan.space import Freedom


class Explained(StrEnum):
    """What --explain spells out."""

    MEMORY = "memory"
    TIME = "time"
    TRAFFIC = "traffic"


class WeightKind(StrEnum):
    """Number formats of weights in inference."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class CacheKind(StrEnum):
    """Number formats of the key-value cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A model's name, a config.json or a folder with one, or a run.toml.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="8xH100-80GB, or 4x8xH100-80GB for 4 nodes of 8.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw | adam | sgd | adamw8bit")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 | bf16 | fp16")] = None,
    plan_path: Annotated[Path | None, typer.Option("--plan", help="Estimate just this plan.toml.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Fix a key of the plan: mesh.tp=8; or model.attention; may be repeated."),
    ] = None,
    trains: Annotated[bool, typer.Option("--trains", help="Only layouts that this version of weft trains.")] = False,
    dryrun: Annotated[bool, typer.Option("--dryrun", help="Confirm the plans shown by dry run, as built.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the best plan here; or the drawing, as SVG.")] = None,
    explain: Annotated[Explained | None, typer.Option(help="Print the arithmetic of one plan.")] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Weights and KV cache instead of training.")] = False,
    weights: Annotated[WeightKind, typer.Option(help="Of inference.")] = WeightKind.BF16,
    kv_cache: Annotated[CacheKind, typer.Option("--kv-cache", help="Of inference.")] = CacheKind.BF16,
    concurrent: Annotated[int, typer.Option(min=1, help="Sequences at a time, of inference.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a sequence, of inference.")] = None,
    draw_schedule: Annotated[str | None, typer.Option(help="Draw a pipeline schedule: 1f1b, zbv, …")] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline ranks to draw.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches to draw.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")] = False,
) -> None:
    """Search every legal layout of a model on devices: memory, traffic, time, and why. Needs neither torch nor GPUs."""
    if draw_schedule is not None:
        _draw(draw_schedule, stages=stages, microbatches=microbatches, out=out, as_json=as_json)
        return
    model, devices = _require_model(model, devices)
    if inference:
        _infer(model, devices, weights, kv_cache, concurrent=concurrent, context=context, as_json=as_json)
        return
    from weft.plan.ask import ask
    from weft.plan.space import Freedom
    from weft.plan.trained import built

    attention, settings = attention_of(settings or [])
    fixed = fixed_keys(settings)
    tables = _precision(plan_path, fixed, precision, devices)
    question = ask(
        model,
        devices,
        global_batch=global_batch,
        sequence_length=sequence_length,
        optimizer=optimizer,
        precision=tables,
        attention=attention,
    )
    if plan_path is not None or "mesh.tp" in fixed:
        question = replace(question, request=replace(question.request, tp_may_leave_node=True))
    if plan_path is not None:
        answer = _estimate_one(question, plan_path, settings)
    else:
        answer = _search(question, built(fixed) if trains else Freedom(fixed=fixed), top=top)
    confirmed = _confirm(question, answer, model) if dryrun else None
    _tell(question, answer, confirmed, explain=explain, as_json=as_json)
    if out is not None:
        _write(question, answer, out, command=_command(model, devices))
    is_refuted = confirmed is not None and confirmed[0].fits is False
    raise typer.Exit(code=0 if answer.plans[0].fits and not is_refuted else 1)


def attention_of(settings: list[str]) -> tuple[str | None, list[str]]:
    """(model.attention, if it is set; the other settings): the one key of run.toml that a plan's cost depends on and
    no option names."""
    from weft.core.config import apply_settings

    given = [one for one in settings if one.partition("=")[0].strip() == "model.attention"]
    named = apply_settings({}, given).get("model", {}).get("attention")
    return None if named is None else str(named), [one for one in settings if one not in given]


def fixed_keys(settings: list[str]) -> dict[str, Any]:
    """--set section.key=value as {"section.key": value}, checked against plan.toml's keys."""
    from weft.core.config import apply_settings, parse
    from weft.core.plan import SECTIONS, Plan

    tables = apply_settings({}, settings)
    _require_sections(tables, SECTIONS)
    parse(Plan, tables, source="--set")
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def _require_sections(tables: dict[str, Any], sections: tuple[str, ...]) -> None:
    import difflib

    from weft.core.errors import UnknownKeyError

    for section in tables:
        if section not in sections:
            near = difflib.get_close_matches(section, sections, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownKeyError(
                f"--set: a plan has no section {section!r}", hint=f"{hint}sections: {', '.join(sections)}"
            )


def _require_model(model: str | None, devices: str | None) -> tuple[str, str]:
    from weft.core.errors import InputError

    if model is None:
        raise InputError("which model?", hint="weft plan llama-3-8b --devices 8xH100-80GB")
    if devices is None:
        raise InputError("on which devices?", hint=f"weft plan {model} --devices 8xH100-80GB")
    return model, devices


def _precision(plan_path: Path | None, fixed: dict[str, Any], preset: str | None, devices: str) -> dict[str, Any]:
    """[precision] of the plan file, of --set, of --precision; bf16 where none says."""
    from weft import hardware
    from weft.core.config import read_toml
    from weft.core.open_choices import plan_on

    tables: dict[str, Any] = {"preset": preset or "bf16"}
    if plan_path is not None:
        is_cpu = hardware.cluster(devices).device.is_cpu
        plan = plan_on(read_toml(plan_path), on_gpu=not is_cpu, source=str(plan_path))
        tables = plan.precision.model_dump(exclude_none=True)
        if preset is not None:
            tables["preset"] = preset
    tables |= {key.partition(".")[2]: value for key, value in fixed.items() if key.startswith("precision.")}
    return tables


def _estimate_one(question: Question, path: Path, settings: list[str]) -> Answer:
    import time

    from weft.core.config import apply_settings, read_toml
    from weft.core.open_choices import plan_on
    from weft.plan.ask import require_legal
    from weft.plan.estimate import estimate
    from weft.plan.memory.budget import settled
    from weft.plan.search import Answer

    began_s = time.perf_counter()
    tables = {**apply_settings(read_toml(path), settings), "precision": question.precision}
    chosen = settled(question.request, plan_on(tables, on_gpu=not question.request.is_cpu, source=str(path)))
    require_legal(question.request, chosen, source=str(path))
    found = estimate(question.request, chosen)
    elapsed_s = time.perf_counter() - began_s
    return Answer(question.request, [found], 1, 1, {}, int(found.fits), [], elapsed_s, smallest=found)


def _search(question: Question, freedom: Freedom, *, top: int) -> Answer:
    from weft.core.errors import BadValueError, PlanError
    from weft.plan.rules import nearest_legal
    from weft.plan.search import search
    from weft.plan.space import check_fixed

    for sentence, hint in check_fixed(freedom.fixed):
        raise BadValueError(f"--set: {sentence}", hint=hint)
    answer = search(question.request, freedom=freedom, precision=question.precision, top=top)
    if not answer.plans:
        reason = max(
            answer.rejected, key=lambda name: answer.rejected[name], default="no mesh goes with what was fixed"
        )
        raise PlanError(f"no plan is legal: {reason}", hint=nearest_legal(question.request, freedom.fixed))
    return answer


def _confirm(question: Question, answer: Answer, model: str) -> list[Confirmation]:
    from weft.cli.plan_dryrun import confirm

    return confirm(question, answer, model=model)


def _tell(
    question: Question,
    answer: Answer,
    confirmed: list[Confirmation] | None,
    *,
    explain: Explained | None,
    as_json: bool,
) -> None:
    from weft.cli import plan_view

    if as_json:
        found = answer_as_dict(question, answer, explain=explain)
        for plan, confirmation in zip(found["plans"], confirmed or [], strict=confirmed is not None):
            plan["dry_run"] = confirmation.as_dict()
        print(json.dumps(found))
        return
    plan_view.show(question, answer, confirmed=[one.text() for one in confirmed] if confirmed is not None else None)
    if explain is not None:
        plan_view.show_arithmetic(answer, str(explain))


def answer_as_dict(question: Question, answer: Answer, *, explain: Explained | None = None) -> dict[str, Any]:
    """What --json prints."""
    from weft.plan.trained import why_not_trained
    from weft.plan.why import smallest_changes, what_would_change

    best = answer.plans[0]
    found: dict[str, Any] = {
        "plans": [
            {**plan.as_dict(), "why": reason} for plan, reason in zip(answer.plans, reasons(answer), strict=True)
        ],
        "considered": answer.considered,
        "estimated": answer.estimated,
        "rejected": answer.rejected,
        "elapsed_s": answer.elapsed_s,
        "num_fitting": answer.num_fitting,
        "pareto": [plan.as_dict() for plan in answer.pareto],
        "model": model_as_dict(question),
        "devices": devices_as_dict(question),
        "workload": {
            "global_batch": question.request.workload.global_batch,
            "sequence_length": question.request.workload.sequence_length,
            "optimizer": question.request.workload.optimizer,
        },
        "attention": attention_as_dict(question),
        "assumed": list(question.assumed),
        "what_would_change": what_would_change(answer) if best.fits and len(answer.plans) > 1 else [],
        "what_would_fit": [] if best.fits else smallest_changes(answer),
        "trains": not why_not_trained(best),
    }
    if explain is Explained.MEMORY:
        from weft.plan.arithmetic import explain_memory

        _, lines = explain_memory(answer.request, best.plan)
        found["arithmetic"] = [{"term": str(line.term), "formula": line.formula, "bytes": line.bytes} for line in lines]
    return found


def reasons(answer: Answer) -> list[str]:
    """A sentence for each plan."""
    from weft.plan.why import loses_by, why_best

    best = answer.plans[0]
    return [why_best(answer), *(loses_by(best, other) for other in answer.plans[1:])]


def model_as_dict(question: Question) -> dict[str, Any]:
    shape = question.request.shape
    return {
        "name": shape.name,
        "type": shape.model_type,
        "parameters": shape.num_parameters,
        "active_parameters": shape.num_active_parameters,
        "layers": shape.num_layers,
        "exact": shape.is_exact,
    }


def attention_as_dict(question: Question) -> dict[str, Any]:
    request = question.request
    kinds = [block.attention for block in request.shape.kinds if block.attention is not None]
    return {
        "asked": request.workload.attention,
        "writes_scores": any(request.writes_scores(kind) for kind in kinds),
    }


def devices_as_dict(question: Question) -> dict[str, Any]:
    cluster = question.request.cluster
    return {
        "name": cluster.name,
        "count": cluster.num_devices,
        "memory_bytes": cluster.device.memory_bytes,
        "budget_bytes": int(question.request.budget_bytes),
        "calibrated": cluster.calibrated,
    }


def _write(question: Question, answer: Answer, path: Path, *, command: str) -> None:
    best = answer.plans[0]
    _write_text(path, commented(question, best, why=reasons(answer)[0], command=command))


def commented(question: Question, best: Estimate, *, why: str, command: str) -> str:
    """plan.toml with what it is for and what is expected of it."""
    from weft.core.units import format_bytes, format_count, format_seconds
    from weft.plan.words import describe

    workload = question.request.workload
    head = [
        describe(best.plan),
        f"for {question.request.shape.name} on {question.request.cluster.name}, "
        f"{workload.global_batch:,} sequences of {workload.sequence_length:,} tokens a step",
        f"predicted: {format_bytes(best.memory_bytes)} a device, {format_seconds(best.step_s)} a step, "
        f"{format_count(best.tokens_per_s)} tokens/s, MFU {best.mfu:.0%}",
        *(part.strip() for part in why.split(";")),
        f"made by: {command}",
    ]
    return "".join(f"# {line}\n" for line in head) + "\n" + best.plan.to_toml()


def _infer(
    model: str,
    devices: str,
    weights: WeightKind,
    cache: CacheKind,
    *,
    concurrent: int,
    context: int | None,
    as_json: bool,
) -> None:
    from weft import hardware
    from weft.cli import plan_view
    from weft.plan.ask import resolve_model
    from weft.plan.inference import estimate_inference

    shape, _ = resolve_model(model)
    found = estimate_inference(
        shape,
        hardware.cluster(devices),
        weights=weights.value,
        cache=cache.value,
        concurrent=concurrent,
        context=context or shape.max_positions or 4096,
    )
    if as_json:
        print(json.dumps({"inference": found.as_dict()}))
    else:
        plan_view.show_inference(shape, found)
    raise typer.Exit(code=0 if found.fits else 1)


def _draw(name: str, *, stages: int, microbatches: int, out: Path | None, as_json: bool) -> None:
    from weft.cli.plan_view import draw

    drawn = draw(name, stages=stages, microbatches=microbatches)
    if as_json:
        print(json.dumps(drawn.as_dict()))
    else:
        print(drawn.text)
        out = out or Path(f"{name}-{stages}x{microbatches}.svg")
    if out is not None:
        _write_text(out, drawn.svg)


def _write_text(path: Path, content: str) -> None:
    from weft.core.errors import InputError

    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", hint="choose another --out") from None
    print(f"wrote {path}", file=sys.stderr)


def _command(model: str, devices: str) -> str:
    return f"weft plan {model} --devices {devices}"
