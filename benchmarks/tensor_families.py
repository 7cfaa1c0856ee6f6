"""Tensor parallelism over every causal LM type of the installed transformers: two ranks against one process.

    python benchmarks/tensor_families.py --out benchmarks/results/tensor_families-DATE.md
        --docs docs/reference/tensor-families.md --layout-rows ROWS [--types llama gpt2 ...] [--degree 2] [--unvouched]

A tiny model of each type takes three steps under mesh.tp and in one process, in float32. Compared are the losses, the
gradient norms, every gradient of the first step and an evaluation. A type is `right`, `refused` (weft said why), `not
built` (not even in one process) or WRONG. `--unvouched` also shards families that are not in COMPARED yet.
"""

from __future__ import annotations

import datetime
import logging
import platform
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_families as tiny
import torch
import transformers
from gloo import RankFailureError, preload, run_ranks
from tiny_families import Facts
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import WeftError
from weft.core.run_spec import RunSpec
from weft.engine.engine import Engine
from weft.engine.measure.meter import StepMeter
from weft.verify.evidence import _full_tensors
from weft.verify.planned import PlannedCollectives, Traffic, check_collectives
from weft.zoo import tensor_exceptions

LIMIT_S = 120
_MODELS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)  # and all they import


def course(rank: int, _world: int, model_type: str, tables: Facts, unvouched: bool) -> Facts | None:
    """Three steps and an evaluation on this rank; full gradients of the first step on rank 0."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    every = frozenset(CONFIG_MAPPING) if unvouched else tensor_exceptions.COMPARED
    try:
        with mock.patch.object(tensor_exceptions, "COMPARED", every):
            found = _train(model_type, tables)
    except WeftError as error:
        found = {"refused": str(error)}
    return found if rank == 0 else None


def _train(model_type: str, tables: Facts) -> Facts:
    engine = tiny.engine_of(tiny.config_of(model_type), tables)
    gradients: dict[str, Any] = {}

    def keep(found: dict[str, torch.Tensor]) -> None:
        if not gradients:
            gradients.update({name: value.numpy() for name, value in _full_tensors(engine, found).items()})

    engine.on_gradients = keep
    shares = [engine.share_of(batch) for batch in tiny.batches()]
    records = [engine.step(batch) for batch in shares[:-1]]
    meter = StepMeter(engine)
    with meter.measuring():
        meter.next_step()
        records.append(engine.step(shares[-1]))
    rows = [row for row in engine.coverage() if row.tied_to is None]
    return {
        "losses": [record.loss for record in records] + [engine.evaluate(shares[0]).loss],
        "norms": [record.grad_norm for record in records],
        "gradients": gradients,
        "unplanned": _unplanned(engine, model_type, meter.traffic),
        "coverage": [(row.name, _elements(row.shape), "tp" in row.sharded_axes, row.reason) for row in rows],
    }


def _unplanned(engine: Engine, model_type: str, traffic: Traffic) -> str:
    """How the collectives of a step differ from those of the planner."""
    run = RunSpec.from_tables(
        {"model": {"type": model_type}, "data": {"sequence_length": tiny.LENGTH}, "train": {"global_batch": tiny.ROWS}}
    )
    planned = PlannedCollectives.of(run, engine.plan, config=engine.model.config, coverage=engine.coverage())
    check = check_collectives(planned, traffic)
    return "" if check.ok else f"collectives: {check.detail}"


def _elements(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def judge(model_type: str, *, degree: int, unvouched: bool) -> Facts:
    """The row of one type: sequence parallel where it may be, else without."""
    began_s = time.perf_counter()
    row: Facts = {"type": model_type, "verdict": "not built", "why": "", "variant": ""}
    try:
        truth = _course(model_type, {}, 1, unvouched)
        if "refused" in truth:
            return {**row, "why": truth["refused"]}
        found = {}
        for sp, lp in ((True, True), (False, False)):
            switches = {"sequence_parallel": sp, "loss_parallel": lp}
            row["variant"] = f"{'SP' if sp else 'no SP'}, {'LP' if lp else 'no LP'}"
            row["verdict"] = "WRONG"  # until shown otherwise
            one = _course(model_type, {"mesh": {"tp": degree}, "tensor_parallel": switches}, degree, unvouched)
            if "refused" in one:
                row[f"refused {row['variant']}"] = one["refused"]
                continue
            found = one
            wrong = tiny.difference(truth, found) or found["unplanned"]
            if wrong:
                return {**row, "why": wrong, **_covered(found)}
    except RankFailureError as error:
        return {**row, "why": tiny.last_line(str(error)), "seconds": time.perf_counter() - began_s}
    row["seconds"] = time.perf_counter() - began_s
    if not found:
        return {**row, "verdict": "refused", "why": row["refused no SP, no LP"]}
    return {**row, "verdict": "right", "why": row.get("refused SP, LP", ""), **_covered(found)}


def _course(model_type: str, tables: Facts, num_ranks: int, unvouched: bool) -> Facts:
    answer: Facts = run_ranks(course, num_ranks, model_type, tables, unvouched, timeout_s=LIMIT_S)[0]
    return answer


def _covered(found: Facts) -> Facts:
    rows = found["coverage"]
    sharded = [row for row in rows if row[2]]
    reasons = Counter(reason or "no reason given" for _, _, is_sharded, reason in rows if not is_sharded)
    share = sum(row[1] for row in sharded) / max(1, sum(row[1] for row in rows))
    return {"sharded": len(sharded), "of": len(rows), "share": share, "replicated": dict(reasons.most_common())}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan of the second table: tp beside data parallelism, with SP and LP both on or both off."""

    tp: int
    dp: int
    zero: int
    switches: bool

    def tables(self) -> Facts:
        return {
            "mesh": {"tp": self.tp, "dp_shard" if self.zero else "dp_replicate": self.dp},
            "data_parallel": {"zero": self.zero},
            "tensor_parallel": {"sequence_parallel": self.switches, "loss_parallel": self.switches},
        }

    def __str__(self) -> str:
        beside = f" x {'ZeRO-' + str(self.zero) if self.zero else 'DDP'} {self.dp}" if self.dp > 1 else ""
        return f"tp {self.tp}{beside}{', SP, LP' if self.switches else ''}"


LAYOUTS = (
    *(Layout(tp=2, dp=2, zero=zero, switches=on) for zero in (0, 1, 2, 3) for on in (True, False)),
    *(Layout(tp=4, dp=1, zero=0, switches=on) for on in (True, False)),
    *(Layout(tp=4, dp=2, zero=zero, switches=zero != 0) for zero in (0, 1, 2, 3)),
    *(Layout(tp=2, dp=4, zero=zero, switches=zero != 3) for zero in (0, 1, 2, 3)),
)
LAYOUT_FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2", "granite", "cohere",
    "stablelm", "mixtral", "qwen3_moe",
)  # fmt: skip


def judge_layouts(model_type: str) -> Facts:
    """One family under every layout of the second table."""
    truth, wrong, refused = _course(model_type, {}, 1, False), {}, {}
    for layout in LAYOUTS:
        try:
            found = _course(model_type, layout.tables(), layout.tp * layout.dp, False)
            if "refused" in found:
                refused[str(layout)] = found["refused"]
            elif tiny.difference(truth, found):
                wrong[str(layout)] = tiny.difference(truth, found)
        except RankFailureError as error:
            wrong[str(layout)] = tiny.last_line(str(error))
    right = len(LAYOUTS) - len(wrong) - len(refused)
    return {"type": model_type, "layouts": len(LAYOUTS), "right": right, "refused": refused, "wrong": wrong}


def result_page(rows: list[Facts], by_layout: list[Facts], *, degree: int) -> str:
    """The dated result, caveats first."""
    counts = Counter(row["verdict"] for row in rows)
    lines = [
        f"# Tensor parallelism over model families, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: models of two layers and width 64 with random weights, three steps, float32, CPU processes on one",
        f"machine, rows of {tiny.LENGTH} tokens. Compared with one process: {tiny.COMPARED}, and the",
        "collectives of a step with those of the planner. Vectors are moved off their initial zeros and ones, as those",
        "hide bugs.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- mesh.tp = {degree}: {counts['right']} right, {counts['refused']} refused with a sentence,"
        f" {counts['WRONG']} WRONG, {counts['not built']} not built even in one process, of {len(rows)} types",
        "- SP: sequence parallel; LP: loss parallel. A right type was right with both and with neither.",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/tensor_families.py --out FILE --docs FILE`",
        "",
        "| type | verdict | sharded | why SP is refused, or the difference |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {row['type']} | {row['verdict']} | {_sharded_text(row)} | {tiny.cell(row['why'])} |" for row in rows]
    if by_layout:
        lines += ["", *_layout_lines(by_layout)]
    return "\n".join(lines) + "\n"


def degree_lines(rows: list[Facts], others: dict[str, Facts]) -> str:
    """What is otherwise at mesh.tp = 4."""
    if not others:
        return ""
    counts = Counter(row["verdict"] for row in others.values())
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    lines = ["", "## At mesh.tp = 4", "", f"{told}. Two key-value heads are repeated. Other than at mesh.tp = 2:", ""]
    lines += ["| type | verdict | why |", "| --- | --- | --- |"]
    for row in rows:
        other = others.get(row["type"], row)
        if other["verdict"] != row["verdict"]:
            lines.append(f"| {row['type']} | {other['verdict']} | {tiny.cell(other['why'])} |")
    return "\n".join(lines) + "\n"


def _layout_lines(rows: list[Facts]) -> list[str]:
    names = "; ".join(str(layout) for layout in LAYOUTS)
    right, total = sum(row["right"] for row in rows), sum(row["layouts"] for row in rows)
    lines = [
        "## Beside data parallelism, on 4 and 8 ranks",
        "",
        f"{right} of {total} right. Layouts: {names}. Two key-value heads: tp 4 repeats them.",
        "",
        "| family | layouts | right | refused | wrong |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        refused, wrong = ("; ".join(f"{k}: {v}" for k, v in row[key].items()) for key in ("refused", "wrong"))
        lines.append(
            f"| {row['type']} | {row['layouts']} | {row['right']} | {tiny.cell(refused)} | {tiny.cell(wrong)} |"
        )
    return lines


def docs_page(rows: list[Facts]) -> str:
    """The reference page: for each type, the sharded parameters and the reasons of the replicated ones."""
    tried = [row for row in rows if row["verdict"] != "not built"]
    right = [row for row in tried if row["verdict"] == "right"]
    lines = [
        "# Tensor parallelism by model type",
        "",
        f"{len(right)} of the {len(tried)} causal LM types of transformers {transformers.__version__} that weft builds",
        "train under tensor parallelism with the numbers of one process; the others are refused, with a reason.",
        "A tiny model of each trained at `mesh.tp = 2`; `benchmarks/tensor_families.py` writes this page. `sharded` is",
        "the number of sharded parameters and their share of all elements. Every rank has the replicated ones; `weft",
        "verify` lists them for your model.",
        "",
        "SP `no`: set `tensor_parallel.sequence_parallel = false` for this type; the last column has the reason.",
        "",
        "| type | verdict | sharded | SP | replicated parameters by reason |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in tried:
        is_right = row["verdict"] == "right"
        sp = ("no" if row["why"] else "yes") if is_right else ""
        reasons = ", ".join(f"{why} ({count})" for why, count in row.get("replicated", {}).items())
        why = f"SP: {row['why']}. {reasons}" if is_right and row["why"] else reasons or row["why"]
        lines.append(f"| {row['type']} | {row['verdict']} | {_sharded_text(row)} | {sp} | {tiny.cell(why)} |")
    return "\n".join(lines) + "\n"


def _sharded_text(row: Facts) -> str:
    return f"{row['sharded']} of {row['of']}, {row['share']:.0%}" if "share" in row else ""


def main() -> None:
    parser = tiny.page_parser(__doc__)
    parser.add_argument("--layout-rows", type=Path, help="as --rows, for well-known families beside data parallelism")
    parser.add_argument("--tp4-rows", type=Path, help="what --rows kept of a run with --degree 4, for the page")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--unvouched", action="store_true")
    given = parser.parse_args()
    preload("weft.core.plan", "families_train", "weft.verify.evidence", *_MODELS)
    done = tiny.read_rows(given.rows)
    for model_type in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in done:
            row = done[model_type] = judge(model_type, degree=given.degree, unvouched=given.unvouched)
            print(f"{model_type:26} {row['verdict']:9} {row.get('share', 0):4.0%} {row['why'][:200]}", flush=True)
            tiny.keep_row(given.rows, row)
    by_layout = tiny.read_rows(given.layout_rows)
    for model_type in LAYOUT_FAMILIES if given.layout_rows else ():
        if model_type not in by_layout:
            row = by_layout[model_type] = judge_layouts(model_type)
            print(f"{model_type:26} {row['right']} of {row['layouts']} {row['wrong']} {row['refused']}", flush=True)
            tiny.keep_row(given.layout_rows, row)
    rows = [done[name] for name in sorted(done)]
    if given.out:
        page = result_page(rows, list(by_layout.values()), degree=given.degree)
        given.out.write_text(page + degree_lines(rows, tiny.read_rows(given.tp4_rows)), encoding="utf-8")
    if given.docs:
        given.docs.write_text(docs_page(rows), encoding="utf-8")
    if any(row["verdict"] == "WRONG" for row in rows) or any(row["wrong"] for row in by_layout.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
