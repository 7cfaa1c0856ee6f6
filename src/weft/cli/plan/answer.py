"""The answer of `weft plan`: one plan estimated or all legal plans searched, then printed, as JSON, or as plan.toml."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft import hardware
from weft.cli.output import write_text
from weft.cli.plan import view
from weft.cli.plan.confirm import Confirmation
from weft.cli.plan.settings import attention_of, document_length_of, fixed_keys, require_settable
from weft.core.config import apply_settings, read_toml
from weft.core.errors import PlanError
from weft.core.units import format_bytes, format_count, format_seconds
from weft.plan.arithmetic import explain_memory
from weft.plan.ask import Question, ask, require_planned
from weft.plan.cp.work import work_by_split
from weft.plan.estimate import Estimate, estimate
from weft.plan.formats import explain_precision, preset_as_dict
from weft.plan.memory.budget import with_chosen_mixture
from weft.plan.objective import keys_of, with_fixed
from weft.plan.offloaded_blocks import with_chosen_blocks
from weft.plan.resolve import with_choices, with_whole_loss
from weft.plan.rules import nearest_legal
from weft.plan.search import Answer, search
from weft.plan.space import Freedom
from weft.plan.time.documents import documents_note
from weft.plan.trained import built, why_not_trained
from weft.plan.why import loses_by, smallest_changes, what_would_change, why_best
from weft.plan.words import describe


def find_plans(
    model: str,
    devices: str,
    *,
    plan_path: Path | None,
    settings: list[str],
    precision: str | None,
    only_trained: bool,
    top: int,
    host_memory_bytes: int | None = None,
    **workload: Any,
) -> tuple[Question, Answer]:
    """The plan of `plan_path` estimated, or the best plans of the search.

    `workload`: global_batch, sequence_length and optimizer, None where not given.
    """
    attention, settings = attention_of(settings)
    document_length, settings = document_length_of(model, settings)
    fixed = fixed_keys(settings)
    tables = _precision(plan_path, fixed, precision, devices)
    question = ask(model, devices, precision=tables, attention=attention, document_length=document_length, **workload)
    if plan_path is None:
        fixed = with_fixed(question.fixed, fixed)
    if host_memory_bytes is not None:
        question = question.with_host_memory(host_memory_bytes)
    if plan_path is not None or "mesh.tp" in fixed:
        question = replace(question, request=replace(question.request, tp_may_leave_node=True))
    if plan_path is not None:
        return question, _estimate_one(question, plan_path, settings)
    return question, _search(question, built(fixed) if only_trained else Freedom(fixed=fixed), top=top)


def _precision(plan_path: Path | None, fixed: dict[str, Any], preset: str | None, devices: str) -> dict[str, Any]:
    """[precision] of the plan file, of --set, of --precision; bf16 by default."""
    tables: dict[str, Any] = {"preset": preset or "bf16"}
    if plan_path is not None:
        is_cpu = hardware.cluster(devices).device.is_cpu
        plan = with_choices(read_toml(plan_path), on_gpu=not is_cpu, source=str(plan_path))
        tables = plan.precision.model_dump(exclude_none=True)
        if preset is not None:
            tables["preset"] = preset
    tables |= {key.partition(".")[2]: value for key, value in fixed.items() if key.startswith("precision.")}
    return tables


def _estimate_one(question: Question, path: Path, settings: list[str]) -> Answer:
    began_s = time.perf_counter()
    tables = {**apply_settings(read_toml(path), settings), "precision": question.precision}
    tables = with_whole_loss(tables) if question.fixed else tables
    request = question.request
    asked = with_choices(tables, on_gpu=not request.is_cpu, source=str(path), has_codes=request.shape.has_codes)
    with_fixed(question.fixed, keys_of(asked))
    chosen = with_chosen_blocks(question.request, with_chosen_mixture(question.request, asked))
    require_planned(question.request, chosen, source=str(path))
    found = estimate(question.request, chosen)
    elapsed_s = time.perf_counter() - began_s
    return Answer(question.request, [found], 1, 1, {}, int(found.fits), [], elapsed_s, smallest=found)


def _search(question: Question, freedom: Freedom, *, top: int) -> Answer:
    require_settable(freedom.fixed)
    answer = search(question.request, freedom=freedom, precision=question.precision, top=top)
    if not answer.plans:
        reason = max(answer.rejected, key=lambda name: answer.rejected[name], default="no mesh matches the fixed keys")
        raise PlanError(f"no plan is legal: {reason}", hint=nearest_legal(question.request, freedom.fixed))
    return answer


def print_answer(
    question: Question,
    answer: Answer,
    confirmed: list[Confirmation] | None,
    *,
    explain: str | None,
    as_json: bool,
) -> None:
    if as_json:
        found = answer_as_dict(question, answer, explain=explain)
        for plan, confirmation in zip(found["plans"], confirmed or [], strict=confirmed is not None):
            plan["dry_run"] = confirmation.as_dict()
        print(json.dumps(found))
        return
    view.show(question, answer, confirmed=[one.text() for one in confirmed] if confirmed is not None else None)
    if explain is not None:
        view.show_arithmetic(answer, explain)


def answer_as_dict(question: Question, answer: Answer, *, explain: str | None = None) -> dict[str, Any]:
    """The object that --json prints."""
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
    if explain == "memory":
        _, lines = explain_memory(answer.request, best.plan)
        found["arithmetic"] = [{"term": str(line.term), "formula": line.formula, "bytes": line.bytes} for line in lines]
    if explain == "time":
        length = answer.request.workload.sequence_length
        found["attention_work"] = work_by_split(best.plan, answer.request.shape, length)
        found["document_length"] = answer.request.workload.document_length
        found["documents"] = documents_note(answer.request)
    if explain == "precision":
        found["precision"] = [asdict(row) for row in explain_precision(answer.request, best.plan)]
        found["preset"] = preset_as_dict(best.plan)
    return found


def reasons(answer: Answer) -> list[str]:
    """One sentence per plan."""
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


def write_plan(question: Question, answer: Answer, path: Path, *, command: str) -> None:
    best = answer.plans[0]
    write_text(path, commented(question, best, why=reasons(answer)[0], command=command))


def commented(question: Question, best: Estimate, *, why: str, command: str) -> str:
    """plan.toml with comments: model, devices, workload, prediction and reasons."""
    workload = question.request.workload
    head = [
        describe(best.plan),
        f"for {question.request.shape.name} on {question.request.cluster.name}, "
        f"{workload.global_batch:,} sequences of {workload.sequence_length:,} tokens per step",
        f"predicted: {format_bytes(best.memory_bytes)} per device, {format_seconds(best.step_s)} per step, "
        f"{format_count(best.tokens_per_s)} tokens/s, MFU {best.mfu:.0%}",
        *(part.strip() for part in why.split(";")),
        f"made by: {command}",
    ]
    return "".join(f"# {line}\n" for line in head) + "\n" + best.plan.to_toml()
