"""Context parallelism over every causal LM type of the installed transformers, by `weft verify` on two ranks.

    python benchmarks/context_families.py --out benchmarks/results/context_families-DATE.md
        --docs docs/reference/context-families.md [--types llama gpt2 ...] [--rows FILE]

The probe (`models/cp/probe.py`) judges a tiny model of each type. Those that pass go through all stages of `weft
verify` at mesh.cp = 2 under ZeRO-3; then, with packed documents whose borders are not those of the ranks and contiguous
parts, under ZeRO-1, through two of them. A type is `right`, `refused` (weft said why), `not built` (not even in one
process), `alike` (it fails on two data-parallel ranks too) or WRONG.
"""

from __future__ import annotations

import datetime
import functools
import logging
import platform
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import tiny_families as tiny
import torch
import transformers
from gloo import preload
from tiny_families import Facts
from tiny_run import write_corpus
from verified_types import SOME_STAGES, Case, case_of, run_tables, verified

from weft.core.errors import WeftError
from weft.models.build import build_skeleton
from weft.models.cp.probe import why_not_divided
from weft.verify.session import STAGES

DEGREE = 2
DROPOUTS = (
    "dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "resid_dropout", "embed_dropout",
    "attn_dropout", "ffn_dropout", "router_jitter_noise", "input_jitter_noise", "layerdrop", "decoder_layerdrop",
    "residual_dropout", "classifier_dropout", "output_dropout",
)  # fmt: skip
NO_DROPOUT: Facts = dict.fromkeys(DROPOUTS, 0.0)
PLAIN: Facts = {"mesh": {"cp": DEGREE}, "data_parallel": {"zero": 3}}
DOCUMENTS: Facts = {
    "mesh": {"cp": DEGREE}, "data_parallel": {"zero": 1}, "context_parallel": {"split": "contiguous"},
}  # fmt: skip
BESIDE: Facts = {"mesh": {"dp_shard": DEGREE}, "data_parallel": {"zero": 3}}  # of types that fail


def judged(corpus: Path, model_types: list[str]) -> Iterator[Facts]:
    plain: dict[str, Case] = {}
    configs: dict[str, Facts] = {}
    for name in model_types:
        fields: Facts = {}
        try:
            skeleton = build_skeleton(tiny.config_of(name, given=fields, fields_where_known=NO_DROPOUT))
        except WeftError as error:
            yield {"type": name, "verdict": "not built", "why": str(error)}
            continue
        if why := why_not_divided(skeleton):
            yield {"type": name, "verdict": "refused", "why": why}
            continue
        configs[name] = fields
        plain[name] = case_of(run_tables(name, fields, corpus), PLAIN, num_ranks=DEGREE)
    rows = dict(verified(plain, num_ranks=DEGREE, stages=STAGES))
    right = [name for name, row in rows.items() if row["verdict"] == "right"]
    packed = {name: run_tables(name, configs[name], corpus, packing="documents") for name in right}
    documents = {name: case_of(run, DOCUMENTS, num_ranks=DEGREE) for name, run in packed.items()}
    for name, row in verified(documents, num_ranks=DEGREE, stages=SOME_STAGES):
        if row["verdict"] == "refused":
            rows[name]["why"] = f"packed documents are refused: {row['why']}"
        elif row["verdict"] != "right":
            rows[name] = {**row, "why": f"documents: {row['why']}"}
        else:
            rows[name] |= {key: max(row[key], rows[name][key]) for key in ("margin",)}
            rows[name]["seconds"] += row["seconds"]
    for name, row in rows.items():
        yield {"type": name, **(_beside(name, row, configs[name], corpus) if row["verdict"] == "WRONG" else row)}


def _beside(name: str, row: Facts, config: Facts, corpus: Path) -> Facts:
    """The row of a type that fails: not for its divided rows, if it fails on two data-parallel ranks too."""
    case = case_of(run_tables(name, config, corpus), BESIDE, num_ranks=DEGREE)
    ((_, found),) = verified({name: case}, num_ranks=DEGREE, stages=SOME_STAGES)
    if found["verdict"] == "right":
        return row
    return {"verdict": "alike", "why": f"verify fails on two ranks without mesh.cp too: {found['why']}"}


def result_page(rows: list[Facts]) -> str:
    """The dated result, caveats first."""
    lines = [
        f"# Context parallelism over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights, four steps, float32, CPU processes on one",
        "machine with other work on it (the seconds are no benchmark), rows of 32 tokens, dropout set to 0.",
        "`margin` is the largest difference over the allowed one; above 1 would fail.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.cp = {DEGREE}, gather: {tiny.counted(rows)}, of {len(rows)} types",
        "- `right`: every stage of `weft verify` with ZeRO-3 and zig-zag, and of packed documents with ZeRO-1 and",
        f"  contiguous parts: {'; '.join(SOME_STAGES)}",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/context_families.py --out FILE --docs FILE`",
        "",
        "| type | verdict | margin | seconds | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = f"{row['margin']:.3f} | {row['seconds']:.0f}" if "margin" in row else " | "
        lines.append(f"| {row['type']} | {row['verdict']} | {numbers} | {tiny.cell(row['why'])} |")
    return "\n".join(lines) + "\n"


def docs_page(rows: list[Facts]) -> str:
    """What a user looks up: can my model's rows be divided, and if not, why?"""
    right = [row for row in rows if row["verdict"] == "right"]
    tried = [row for row in rows if row["verdict"] != "not built"]
    alike = [row for row in rows if row["verdict"] == "alike"]
    lines = [
        "# Context parallelism by model type",
        "",
        f"{len(right)} of the {len(tried)} causal LM types of transformers {transformers.__version__} that weft",
        "builds pass all stages of `weft verify` at `mesh.cp = 2`, as tiny models, with packed documents where it",
        "takes them. Others are refused, with a reason: they mix positions outside of attention, or count them",
        f"by themselves. Those train with `mesh.cp = 1`. {len(alike)} have a finding of `weft verify` without it too.",
        "`benchmarks/context_families.py` writes this page.",
        "",
        *tiny.refused_and_right(rows, title="Not verified"),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    given = tiny.page_parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    preload("weft.core.plan", "families_train", "weft.verify.session")
    with tempfile.TemporaryDirectory(prefix="context-families-") as folder:
        judge = functools.partial(judged, write_corpus(Path(folder, "texts")))
        tiny.write_pages(given, judge, result_page=result_page, docs_page=docs_page)


if __name__ == "__main__":
    main()
