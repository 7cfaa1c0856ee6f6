"""`weft verify` at mesh.ep = 2 over every mixture-of-experts causal LM type of the installed transformers.

    python benchmarks/expert_families.py --out benchmarks/results/expert_families-DATE.md
        --docs docs/reference/expert-families.md [--types mixtral ...] [--rows FILE] [--zero 3] [--all-stages]

A tiny model of each type goes through two stages of `weft verify` on two ranks: losses, gradients, norms, weights,
states and evaluations against one process; collectives, traffic and memory against the prediction. `--all-stages` adds
the others: the same bits twice, micro-batches, resume, export, finite data. A type is `right`, `refused` (weft said
why), `not built` (not even in one process) or WRONG.
"""

from __future__ import annotations

import datetime
import logging
import platform
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import tiny_families as tiny
import torch
import transformers
from gloo import preload
from tiny_families import Facts
from tiny_run import write_corpus
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from verified_types import SOME_STAGES, case_of, run_tables, verified

from weft.core.errors import WeftError
from weft.models.build import build_skeleton
from weft.models.ep.finder import find_expert_layout
from weft.verify.session import STAGES

DEGREE = 2
# of types whose first two layers, or whose defaults, have no experts
WITH_EXPERTS: Facts = {
    "mlp_layer_types": ["dense", "sparse"], "num_dense_layers": 1, "mlp_only_layers": [], "num_expert_group": 1,
    "enable_moe_block": True, "top_k_experts": 2, "is_moe": True,
}  # fmt: skip


def find_experts(model_type: str) -> tuple[Facts, Facts] | None:
    """(config fields, facts of the row) of a type; None for a dense one. Raises WeftError if the type is not built."""
    fields: Facts = {}
    layout = find_expert_layout(build_skeleton(tiny.config_of(model_type, given=fields)))
    if not layout.layers and not layout.declined:
        if not _names_experts(model_type):
            return None
        config = tiny.config_of(model_type, given=fields, fields_where_known=WITH_EXPERTS)
        layout = find_expert_layout(build_skeleton(config))
    return fields, {
        "layers": len(layout.layers),
        "experts": max((layer.num_experts for layer in layout.layers), default=0),
        "declined": next(iter(layout.declined.values()), ""),  # why some of its experts stay replicated
    }


def judge_types(model_types: list[str], corpus: Path, *, zero: int, stages: tuple[str, ...]) -> Iterator[Facts]:
    """A row for each type with experts."""
    plan = {"mesh": {"dp_shard": DEGREE, "ep": DEGREE}, "data_parallel": {"zero": zero}}
    cases, facts = {}, {}
    for name in model_types:
        try:
            found = find_experts(name)
        except WeftError as error:
            verdict = "not built" if _names_experts(name) else "dense"
            yield {"type": name, "verdict": verdict, "why": str(error)}
            continue
        if found is None:
            yield {"type": name, "verdict": "dense", "why": ""}
            continue
        fields, facts[name] = found
        cases[name] = case_of(run_tables(name, fields, corpus), plan, num_ranks=DEGREE)
    for name, judged in verified(cases, num_ranks=DEGREE, stages=stages):
        yield {"type": name, **facts[name], **judged}


def _names_experts(model_type: str) -> bool:
    """Whether the config of a type, or a part of it, has a number of experts."""
    try:
        fields = str(CONFIG_MAPPING[model_type]().to_dict())
    except Exception:  # a class without defaults
        return False
    return re.search(r"'(moe_num|num_local|num|n_routed)_experts'", fields) is not None


def result_page(rows: list[Facts], *, zero: int, stages: tuple[str, ...]) -> str:
    """The dated result, caveats first."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        f"# Expert parallelism over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights and few experts, four steps, float32, CPU",
        "processes on one machine with other work on it: the seconds are no benchmark. Stages of `weft verify`:",
        f"{'; '.join(stages)}.",
        "`margin` is the largest difference over the allowed one; above 1 would fail.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.dp_shard = {DEGREE}, mesh.ep = {DEGREE}, ZeRO-{zero}: {counts['right']} right, {counts['refused']}"
        f" refused with a sentence, {counts['WRONG']} WRONG, {counts['not built']} not built even in one process, of"
        f" {len(rows)} types with experts",
        "- `no gradient`: parameters that get none in one process either, so that no layout trains them",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/expert_families.py --out FILE --docs FILE`",
        "",
        "| type | verdict | layers of experts | margin | seconds | no gradient | why, or what was not judged |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        layers = f"{row['layers']} of {row['experts']}" if row.get("layers") else ""
        numbers = f"{row['margin']:.3f} | {row['seconds']:.0f}" if "margin" in row else " | "
        why = row["why"] or _not_judged(row)
        untrained = len(row.get("untrained", [])) or ""
        lines.append(f"| {row['type']} | {row['verdict']} | {layers} | {numbers} | {untrained} | {tiny.cell(why)} |")
    return "\n".join(lines) + "\n"


def _not_judged(row: Facts) -> str:
    prediction: str = row.get("prediction", "")
    return f"prediction {prediction}" if prediction.startswith("not judged") else ""


def docs_page(rows: list[Facts], *, stages: tuple[str, ...]) -> str:
    """What a user looks up: can my model's experts be divided, and if not, why?"""
    tried = [row for row in rows if row["verdict"] != "not built"]
    right = [row for row in tried if row["verdict"] == "right"]
    untrained = [row for row in right if row["untrained"]]
    lines = [
        "# Expert parallelism by model type",
        "",
        f"{len(right)} of the {len(tried)} mixture-of-experts causal LM types of transformers"
        f" {transformers.__version__} that weft builds",
        "pass these stages of `weft verify` at `mesh.ep = 2`, as tiny models:",
        f"{'; '.join(stages)}. The others are refused, with a reason.",
        "`benchmarks/expert_families.py` writes this page. A refused model trains with `mesh.ep = 1`: ZeRO-3 shards",
        "any model, and tensor parallelism [most](tensor-families.md).",
        "",
        *tiny.refused_and_right(rows, title="Refused, or not built"),
        "",
        "## Parameters without a gradient",
        "",
        "The loss of these types does not depend on some of their parameters, in one process either: an indexer only",
        "chooses tokens, and deepseek_v4 compresses the keys of rows longer than those here. They keep their initial",
        "values in every layout; `weft verify` names them for your model.",
        "",
        "| type | parameters of the tiny model |",
        "| --- | --- |",
        *(f"| {row['type']} | {tiny.cell(', '.join(_kinds(row['untrained'])))} |" for row in untrained),
    ]
    return "\n".join(lines) + "\n"


def _kinds(names: list[str]) -> list[str]:
    """Names without their block's number, once each."""
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))


def main() -> None:
    parser = tiny.page_parser(__doc__)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--all-stages", action="store_true")
    given = parser.parse_args()
    stages = STAGES if given.all_stages else SOME_STAGES
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    done = tiny.read_rows(given.rows)
    left = [name for name in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if name not in done]
    with tempfile.TemporaryDirectory(prefix="expert-families-") as folder:
        preload("weft.core.plan", "families_train", "weft.verify.session")
        corpus = write_corpus(Path(folder, "texts"))
        for row in judge_types(left, corpus, zero=given.zero, stages=stages):
            done[row["type"]] = row
            tiny.keep_row(given.rows, row)
            if row["verdict"] != "dense":
                print(
                    f"{row['type']:26} {row['verdict']:9} {row.get('seconds', 0):4.0f}s {row['why'][:200]}", flush=True
                )
    rows = [done[name] for name in sorted(done) if done[name]["verdict"] != "dense"]
    if given.out:
        given.out.write_text(result_page(rows, zero=given.zero, stages=stages), encoding="utf-8")
    if given.docs:
        given.docs.write_text(docs_page(rows, stages=stages), encoding="utf-8")
    if any(row["verdict"] == "WRONG" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
