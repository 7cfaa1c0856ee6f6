"""Context parallelism over every causal LM type of the installed transformers: two ranks against one process.

    python benchmarks/context_families.py --out benchmarks/results/context_families-DATE.md
        --docs docs/reference/context-families.md [--types llama gpt2 ...] [--rows FILE]

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
from collections.abc import Iterator

import tiny_families as tiny
import torch
import transformers
from gloo import preload
from tiny_families import Facts
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

BESIDE: Facts = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}  # of types that fail


def courses(rank: int, world: int, model_types: list[str], cases: dict[str, Facts], folder: str) -> None:
    """The cases of each type on this rank; full gradients of the first step. One process asks the probe first."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for model_type in model_types:
        try:
            found = {"divided": _why_not(model_type)} if world == 1 else {}
            if not found.get("divided"):
                found |= {name: _train(model_type, plan if world > 1 else {}, name) for name, plan in cases.items()}
        except WeftError as error:
            found = {"refused": str(error)}
        keep_findings(found if rank == 0 else {}, folder, model_type, rank)


def _why_not(model_type: str) -> str:
    return why_not_divided(build_skeleton(tiny.config_of(model_type, fields_where_known=NO_DROPOUT)))


def _train(model_type: str, plan: Facts, case: str) -> Facts:
    with tiny.engine_of(tiny.config_of(model_type, fields_where_known=NO_DROPOUT), plan) as engine:
        batches = [{**batch, **(_documents() if case == "documents" else {})} for batch in tiny.batches()]
        shares = [engine.share_of(batch) for batch in batches]
        return tiny.course_of(engine, shares, lambda found: _full_tensors(engine, found))


def _documents() -> dict[str, torch.Tensor]:
    rows = []
    for begins in BORDERS:
        ends = (*begins[1:], tiny.LENGTH)
        rows.append(torch.cat([torch.arange(end - begin) for begin, end in zip(begins, ends, strict=True)]))
    return {"position_ids": torch.stack(rows)}


def judged(model_types: list[str]) -> Iterator[Facts]:
    alone = {name: found[0] for name, found in run_groups(courses, model_types, 1, CASES)}
    left = [name for name in model_types if "plain" in alone[name]]
    both = {name: found[0] for name, found in run_groups(courses, left, 2, CASES)}
    failed = [name for name in left if "failed" in both[name]]
    for name, found in run_groups(courses, failed, 2, {"plain": BESIDE}):
        if "failed" in found[0]:  # not for its divided rows
            both[name] = {"beside": f"fails on two ranks without mesh.cp too: {tiny.last_line(found[0]['failed'])}"}
    for name in model_types:
        yield {"type": name, **_verdict(alone[name], both.get(name, {}))}


def _verdict(truth: Facts, found: Facts) -> Facts:
    if "beside" in found:
        return {"verdict": "not built", "why": found["beside"]}
    for side, verdict in ((truth, "not built"), (found, "WRONG")):
        if "failed" in side:
            return {"verdict": verdict, "why": tiny.last_line(side["failed"])}
    if truth.get("divided"):
        return {"verdict": "refused", "why": truth["divided"]}
    if "refused" in truth:
        return {"verdict": "not built", "why": truth["refused"]}
    if "refused" in found:
        return {"verdict": "refused", "why": found["refused"]}
    wrong = {case: tiny.difference(truth[case], found[case]) for case in CASES}
    said = "; ".join(f"{case}: {what}" for case, what in wrong.items() if what)
    return {"verdict": "WRONG" if said else "right", "why": said}


def result_page(rows: list[Facts]) -> str:
    """The dated result, caveats first."""
    lines = [
        f"# Context parallelism over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights, three steps, float32, CPU processes on one",
        f"machine, rows of {tiny.LENGTH} tokens, dropout set to 0. Compared with one process: {tiny.COMPARED};",
        "rows of one document with ZeRO-3, and packed documents with ZeRO-1. This is not a run of `weft verify`.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.cp = 2, gather, zigzag: {tiny.counted(rows)}, of {len(rows)} types",
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
    given = tiny.page_parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    preload("weft.core.plan", "families_train", "weft.verify.evidence")
    tiny.write_pages(given, judged, result_page=result_page, docs_page=docs_page)


if __name__ == "__main__":
    main()
