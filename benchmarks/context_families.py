"""Context parallelism over every causal LM type of the installed transformers: two ranks against one process.

    python benchmarks/context_families.py --out benchmarks/results/context_families-DATE.md
        --docs docs/reference/context-families.md [--only llama gpt2 ...] [--rows FILE]

The probe (`models/cp/probe.py`) judges a tiny model of each type. Those that pass take three steps at mesh.cp = 2 and
in one process, in float32: rows of one document, and rows of packed documents whose borders are not those of the ranks.
Compared are the losses, the gradient norms, every gradient of the first step and an evaluation. A type is `right`,
`refused` (weft said why), `not built` (not even in one process) or WRONG.
"""

from __future__ import annotations

import datetime
import logging
import platform
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tiny_families as tiny
import torch
import transformers
from gloo import preload
from tiny_families import Facts
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from type_groups import keep_findings, run_groups

from weft.core.errors import WeftError
from weft.models.build import build_skeleton
from weft.models.cp.probe import why_not_divided
from weft.verify.evidence import _full_tensors

DROPOUTS = (
    "dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "resid_dropout", "embed_dropout",
    "attn_dropout", "ffn_dropout", "router_jitter_noise", "input_jitter_noise", "layerdrop", "decoder_layerdrop",
    "residual_dropout", "classifier_dropout", "output_dropout",
)  # fmt: skip
NO_DROPOUT: Facts = dict.fromkeys(DROPOUTS, 0.0)
BORDERS = ((0, 3, 7), (0, 6), (0, 8, 11), (0, 13))  # of documents in each row
CASES: dict[str, Facts] = {
    "plain": {"mesh": {"cp": 2}, "data_parallel": {"zero": 3}},
    "documents": {"mesh": {"cp": 2}, "data_parallel": {"zero": 1}},
}


def courses(rank: int, world: int, model_types: list[str], folder: str) -> None:
    """Both cases of each type on this rank; full gradients of the first step."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model_type in model_types:
        try:
            found: Facts = {name: _train(model_type, plan if world > 1 else {}, name) for name, plan in CASES.items()}
        except WeftError as error:
            found = {"refused": str(error)}
        keep_findings(found if rank == 0 else {}, folder, model_type, rank)


def _train(model_type: str, plan: Facts, case: str) -> Facts:
    with tiny.engine_of(tiny.config_of(model_type, fields_where_known=NO_DROPOUT), plan) as engine:
        gradients: dict[str, Any] = {}

        def keep(found: dict[str, torch.Tensor]) -> None:
            if not gradients:
                gradients.update({name: value.numpy() for name, value in _full_tensors(engine, found).items()})

        engine.on_gradients = keep
        batches = [{**batch, **(_documents() if case == "documents" else {})} for batch in tiny.batches()]
        records = [engine.step(batch) for batch in batches]
        return {
            "losses": [record.loss for record in records] + [engine.evaluate(batches[0]).loss],
            "norms": [record.grad_norm for record in records],
            "gradients": gradients,
        }


def _documents() -> dict[str, torch.Tensor]:
    rows = []
    for begins in BORDERS:
        ends = (*begins[1:], tiny.LENGTH)
        rows.append(torch.cat([torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)]))
    return {"position_ids": torch.stack(rows)}


def probed(model_type: str) -> Facts:
    """The row of a type before any rank starts; without a verdict if the probe lets it pass."""
    row: Facts = {"type": model_type, "verdict": "", "why": ""}
    try:
        model = build_skeleton(tiny.config_of(model_type, fields_where_known=NO_DROPOUT))
    except WeftError as error:
        return {**row, "verdict": "not built", "why": str(error)}
    if sum(parameter.numel() for parameter in model.parameters()) > tiny.MOST_PARAMETERS:
        return {**row, "verdict": "not built", "why": "this script's size fields do not make it small"}
    reason = why_not_divided(model)
    return {**row, "verdict": "refused", "why": reason} if reason else row


def judged(model_types: list[str]) -> Iterator[Facts]:
    rows = [probed(name) for name in model_types]
    yield from (row for row in rows if row["verdict"])
    left = [row["type"] for row in rows if not row["verdict"]]
    for begin in range(0, len(left), 12):
        part = left[begin : begin + 12]
        alone = {name: found[0] for name, found in run_groups(courses, part, 1)}
        for name, (found, *_) in run_groups(courses, part, 2):
            yield {"type": name, **_verdict(alone[name], found)}


def _verdict(truth: Facts, found: Facts) -> Facts:
    for side, verdict in ((truth, "not built"), (found, "WRONG")):
        if "failed" in side:
            return {"verdict": verdict, "why": tiny.last_line(side["failed"])}
    if "refused" in truth:
        return {"verdict": "not built", "why": truth["refused"]}
    if "refused" in found:
        return {"verdict": "refused", "why": found["refused"]}
    wrong = {case: tiny.difference(truth[case], found[case]) for case in CASES}
    said = "; ".join(f"{case}: {what}" for case, what in wrong.items() if what)
    return {"verdict": "WRONG" if said else "right", "why": said}


def result_page(rows: list[Facts]) -> str:
    """The dated result, caveats first."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        f"# Context parallelism over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights, three steps, float32, CPU processes on one",
        f"machine, rows of {tiny.LENGTH} tokens, dropout set to 0. Compared with one process: {tiny.COMPARED};",
        "rows of one document with ZeRO-3, and packed documents with ZeRO-1. This is not a run of `weft verify`.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.cp = 2, gather, zigzag: {counts['right']} right, {counts['refused']} refused with a sentence,"
        f" {counts['WRONG']} WRONG, {counts['not built']} not built even in one process, of {len(rows)} types",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/context_families.py --out FILE --docs FILE`",
        "",
        "| type | verdict | why |",
        "| --- | --- | --- |",
        *(f"| {row['type']} | {row['verdict']} | {tiny.cell(row['why'])} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def docs_page(rows: list[Facts]) -> str:
    """What a user looks up: can my model's rows be divided, and if not, why?"""
    right = [row for row in rows if row["verdict"] == "right"]
    tried = [row for row in rows if row["verdict"] != "not built"]
    lines = [
        "# Context parallelism by model type",
        "",
        f"{len(right)} of the {len(tried)} causal LM types of transformers {transformers.__version__} that weft",
        "builds train at `mesh.cp = 2` with the losses and gradients of one process, with packed documents too. The",
        "others are refused, with a reason: they mix positions outside of attention, or count positions by themselves.",
        "`benchmarks/context_families.py` writes this page. A refused model trains with `mesh.cp = 1`.",
        "",
        *tiny.refused_and_right(rows, title="Refused, or not built"),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = tiny.page_parser(__doc__)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    done = tiny.read_rows(given.rows)
    left = [name for name in given.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in done]
    preload("weft.core.plan", "families_train", "weft.verify.evidence")
    for begin in range(0, len(left), 24):
        for row in judged(left[begin : begin + 24]):
            done[row["type"]] = row
            tiny.keep_row(given.rows, row)
            print(f"{row['type']:26} {row['verdict']:9} {row['why'][:200]}", flush=True)
    rows = [done[name] for name in sorted(done)]
    if given.out:
        given.out.write_text(result_page(rows), encoding="utf-8")
    if given.docs:
        given.docs.write_text(docs_page(rows), encoding="utf-8")
    if any(row["verdict"] == "WRONG" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
