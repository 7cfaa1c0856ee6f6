"""Pipelines over every causal LM type of the installed transformers: two or four ranks against one process.

    python benchmarks/pipeline_families.py --out benchmarks/results/pipeline_families-DATE.md
        --docs docs/reference/pipeline-families.md [--types llama gpt2 ...] [--rows FILE] [--pp4-rows FILE] [--degree 2]

A tiny model of each type, of four layers, takes three steps under mesh.pp with 1F1B and two micro-batches, and in one
process, in float32. Compared are the losses of every rank, the gradient norms, every gradient of the first step and an
evaluation. A type is `right`, `refused` (weft said why), `not built` (not even in one process) or WRONG.
"""

from __future__ import annotations

import datetime
import logging
import platform
import re
import warnings
from pathlib import Path

import tiny_families as tiny
import torch
import transformers
from gloo import preload
from tiny_families import Facts
from type_groups import keep_findings, run_groups

from weft.core.errors import WeftError

NUM_LAYERS, MICROBATCHES = 4, 2
REFUSAL = re.compile(r"weft\.core\.errors\.(?:PipelineError): (.*)")


def courses(rank: int, _world: int, model_types: list[str], num_layers: int, tables: Facts, folder: str) -> None:
    """Each type in turn."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model_type in model_types:
        keep_findings(_course(model_type, num_layers, tables), folder, model_type, rank)


def _course(model_type: str, num_layers: int, tables: Facts) -> Facts:
    """This rank's losses, norms and first gradients; a refusal before training is the same on every rank."""
    try:
        engine = tiny.engine_of(tiny.config_of(model_type, num_layers=num_layers), tables)
    except WeftError as error:
        return {"refused": str(error)}
    shares = [engine.share_of(batch) for batch in tiny.batches()]
    course = tiny.course_of(
        engine, shares, lambda found: {n: v for n, v in found.items() if n not in engine.layout.copies}
    )
    return {**course, "blocks": len(engine.layout.blocks)}


def run_types(model_types: list[str], *, degree: int, num_layers: int) -> dict[str, list[Facts]]:
    """What each rank found of each type."""
    tables = {"mesh": {"pp": degree}, "pipeline": {"schedule": "1f1b", "microbatches": MICROBATCHES}}
    return dict(run_groups(courses, model_types, degree, num_layers, tables))


def judge(model_type: str, truth: list[Facts], found: list[Facts]) -> Facts:
    """The row of one type."""
    row: Facts = {"type": model_type, "verdict": "not built", "why": "", "when": ""}
    if "losses" not in truth[0]:
        return {**row, "why": truth[0].get("refused") or tiny.last_line(truth[0]["failed"])}
    if "refused" in found[0]:
        return {**row, "verdict": "refused", "why": found[0]["refused"], "when": "before training"}
    if "failed" in found[0]:
        refusals = REFUSAL.findall(found[0]["failed"])
        if refusals:
            return {**row, "verdict": "refused", "why": refusals[-1], "when": "in the first step"}
        return {**row, "verdict": "WRONG", "why": tiny.last_line(found[0]["failed"])}
    gradients = {name: value for one in found for name, value in one["gradients"].items()}
    wrong = [tiny.difference(truth[0], {**one, "gradients": gradients}) for one in found]
    why = next((text for text in wrong if text), "")
    return {**row, "verdict": "WRONG" if why else "right", "why": why, "blocks": [one["blocks"] for one in found]}


def judge_types(model_types: list[str], *, degree: int) -> dict[str, Facts]:
    """Types that do not run in one process with so many layers are tried with two."""
    rows: dict[str, Facts] = {}
    for num_layers in (NUM_LAYERS, 2):
        left = [name for name in model_types if rows.get(name, {"verdict": "not built"})["verdict"] == "not built"]
        truths = run_types(left, degree=1, num_layers=num_layers)
        runs = [name for name in left if "losses" in truths[name][0]]
        founds = run_types(runs, degree=degree, num_layers=num_layers)
        rows |= {name: judge(name, truths[name], founds.get(name, [])) for name in left}
    return rows


def result_page(rows: list[Facts], others: dict[str, Facts], *, degree: int) -> str:
    """The dated result, caveats first."""
    lines = [
        f"# Pipelines over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        f"Caveats: models of {NUM_LAYERS} layers and width 64 with random weights, three steps, float32, CPU processes",
        f"on one machine, rows of {tiny.LENGTH} tokens, 1F1B with {MICROBATCHES} micro-batches. Compared with one",
        f"process, on every rank: {tiny.COMPARED}.",
        "Vectors are moved off their initial zeros and ones, as",
        "those hide bugs. A configuration whose blocks hand on other state than these may be judged otherwise;",
        "`weft verify` looks at your own model.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.pp = {degree}: {tiny.counted(rows)}, of {len(rows)} types",
        *([f"- mesh.pp = 4, of the types that are right: {tiny.counted(list(others.values()))}"] if others else []),
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/pipeline_families.py --out FILE --docs FILE`",
        "",
        "| type | verdict | at pp 4 | refused when | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        other = others.get(row["type"], {"verdict": "", "why": ""})
        why = row["why"] or other["why"]
        lines.append(f"| {row['type']} | {row['verdict']} | {other['verdict']} | {row['when']} | {tiny.cell(why)} |")
    return "\n".join(lines) + "\n"


def docs_page(rows: list[Facts]) -> str:
    """What a user looks up: can my model be a pipeline, and if not, why?"""
    tried = [row for row in rows if row["verdict"] != "not built"]
    right = [row["type"] for row in tried if row["verdict"] == "right"]
    lines = [
        "# Pipelines by model type",
        "",
        f"{len(right)} of the {len(tried)} causal LM types of transformers {transformers.__version__} that weft builds",
        "train as a pipeline with the numbers of one process; the others are refused, with a reason.",
        "A tiny model of each trained at `mesh.pp = 2`; `benchmarks/pipeline_families.py` writes this page. A refused",
        "model trains with `mesh.pp = 1`: ZeRO-3 shards any model, and tensor parallelism [most](tensor-families.md).",
        "",
        *tiny.refused_and_right(tried, title="Refused"),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = tiny.page_parser(__doc__)
    parser.add_argument("--pp4-rows", type=Path, help="what --rows kept of a run with --degree 4, for the page")
    parser.add_argument("--degree", type=int, default=2)
    given = parser.parse_args()
    preload("weft.core.plan", "families_train")
    others = tiny.read_rows(given.pp4_rows)
    tiny.write_pages(
        given,
        lambda names: iter(judge_types(names, degree=given.degree).values()),
        result_page=lambda rows: result_page(rows, others, degree=given.degree),
        docs_page=docs_page,
    )


if __name__ == "__main__":
    main()
